"""AdamW of megatron-core over the parameters of a stage, distributed over the ranks of the data axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...workers.model_options import Optim
from .parallel import Parallel

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Held:
    """What a rank's optimizer has of a parameter: the numbers from ``begin`` on of the parameter laid out flat.

    ``main`` are the weights as they are trained; ``state`` is AdamW's, empty before the first step.
    """

    begin: int
    main: Tensor
    state: dict[str, Any]


class Optimizer:
    """Gradients and AdamW for one stage: ``opt.zero()``, forward and backward passes, ``opt.norm()``, ``opt.step()``.

    ``module`` is the stage as megatron-core wants it: gradients are summed over the data axes. Call it inside of
    :meth:`Parallel.active`. Vectors (norms, biases) are not decayed.
    """

    def __init__(self, stage: Any, config: Any, optim: Optim, parallel: Parallel) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        mesh, low = parallel.mesh, config.params_dtype == torch.bfloat16
        ranks = mesh["dp"] * mesh["cp"] * mesh["ep"]
        self.optim = optim
        self.distributed = low or (ranks > 1 and config.params_dtype == torch.float32)
        self.low = low  # trained weights are wider than those that the model computes with
        shape = DistributedDataParallelConfig(use_distributed_optimizer=self.distributed, grad_reduce_in_fp32=low)
        self.module = DistributedDataParallel(config, shape, stage)
        config.finalize_model_grads_func = lambda model, _, **how: finalize_model_grads(model, None, **how)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            decoupled_weight_decay=True,
            clip_grad=0.0,
            bf16=low,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=self.distributed,
        )
        made = get_megatron_optimizer(settings, [self.module], use_gloo_process_groups=False)
        self.whole = made
        self.parts = list(getattr(made, "chained_optimizers", [made]))
        for group in self._groups():
            group["weight_decay"] = optim.weight_decay * group["wd_mult"]
        self._emptied: list[tuple[Tensor, int]] = []  # buffers of gradients without memory, and their bytes

    def zero(self) -> None:
        """Forget gradients."""
        self.module.zero_grad_buffer()
        self.whole.zero_grad()

    def empty(self) -> int:
        """Free the memory of gradients, which megatron-core keeps between steps. Returns the bytes."""
        module: Any = self.module
        buffers = [*module.buffers, *module.expert_parallel_buffers]
        storages = [buffer.grad_data.untyped_storage() for buffer in buffers]
        self._emptied = [(b.grad_data, s.nbytes()) for b, s in zip(buffers, storages, strict=True)]
        for storage in storages:
            storage.resize_(0)
        return sum(size for _, size in self._emptied)

    def refill(self) -> int:
        """Take it back, with no gradients in it. Returns the bytes."""
        emptied, self._emptied = self._emptied, []
        for gradients, size in emptied:
            gradients.untyped_storage().resize_(size)
            gradients.zero_()
        return sum(size for _, size in emptied)

    def norm(self) -> float:
        """The norm of the gradient of the whole model, the same on every rank."""
        self.whole.prepare_grads()
        return float(self.whole.get_grad_norm())

    def step(self, norm: float, lr: float) -> None:
        """One step, with the gradient scaled down to the largest norm allowed."""
        limit = self.optim.grad_clip
        factor = limit / (norm + 1e-6) if limit is not None else math.inf
        if factor < 1.0:
            for part in self.parts:
                grads = [p.grad for p in part.get_parameters() if p.grad is not None]
                for grad in grads:
                    grad.mul_(factor)
        for group in self._groups():
            group["lr"] = lr
        self.whole.step_with_ready_grads()

    def restart(self) -> None:
        """Forget the moments."""
        for part in self.parts:
            part.optimizer.state.clear()
            _count(part, 0)

    def held(self, parameter: Any) -> Held | None:
        """What this rank trains of a parameter; None where other ranks train all of it."""
        for part in self.parts:
            if not self.distributed:
                if any(p is parameter for p in part.get_parameters()):
                    return Held(0, parameter.detach().view(-1), part.optimizer.state.get(parameter, {}))
            elif parameter in part.model_param_gbuf_map:
                main = _main(part, parameter)
                span = part._get_model_param_range_map(parameter)["param"]
                return Held(span.start, main.detach(), part.optimizer.state.get(main, {}))
        return None

    def moments(self, parameter: Any) -> dict[str, Tensor]:
        """Moments of zeros for what this rank trains of a parameter, to be filled and given to :meth:`take`."""
        held = self.held(parameter)
        return {} if held is None else {kind: torch.zeros_like(held.main) for kind in MOMENTS}

    def take(self, parameter: Any, moments: dict[str, Tensor] | None, steps: int) -> None:
        """Go on from these moments, flat; None: from none."""
        for part in self.parts:
            if not self.distributed:
                if not any(p is parameter for p in part.get_parameters()):
                    continue
                key, shape = parameter, parameter.shape
            elif parameter in part.model_param_gbuf_map:
                key = _main(part, parameter)
                shape = key.shape
            else:
                continue
            part.optimizer.state.pop(key, None)
            if moments is not None:
                state: dict[str, Any] = {kind: moments[kind].view(shape) for kind in MOMENTS}
                part.optimizer.state[key] = state | {"step": torch.tensor(float(steps), dtype=torch.float32)}
            _count(part, 0 if moments is None else steps)

    def weights_written(self, *, trained: bool) -> None:
        """Somebody wrote into the model's weights, or into the ``trained`` ones: make the others the same."""
        if not self.low:
            return
        if not trained:
            self.whole.reload_model_params()
            return
        for part in self.parts:
            part._copy_main_params_to_model_params()
        self.module.start_param_sync(force_sync=True)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part.param_groups


def _count(part: Any, steps: int) -> None:
    """Note how many steps there were where the optimizer counts them by group, which fused ones do from the first on;
    torch's own counts in what it has of each parameter."""
    for group in part.param_groups if not isinstance(part.optimizer, torch.optim.AdamW) else ():
        if steps:
            group["step"] = steps
        else:
            group.pop("step", None)


def _main(part: Any, parameter: Any) -> Any:
    """The flat part of a parameter that a distributed optimizer trains here."""
    group, place = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][place]
