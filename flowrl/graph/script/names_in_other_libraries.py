"""What other libraries call things that flowrl calls otherwise: for the fix of a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable

#: Arguments of TRL, verl, OpenRLHF, vLLM and transformers, with what flowrl calls them.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "n": ("num_generations", "num_return_sequences", "num_samples", "n_samples_per_prompt", "group_size", "rollout_n"),
    "max_tokens": ("max_new_tokens", "max_completion_length", "max_length", "response_length", "generate_max_len"),
    "greedy": ("do_sample", "deterministic"),
    "stop": ("stop_token_ids", "stop_strings", "eos_token_id"),
    "lr": ("learning_rate", "actor_learning_rate"),
    "grad_clip": ("max_grad_norm", "max_norm", "clip_grad"),
    "warmup": ("warmup_steps", "num_warmup_steps", "warmup_ratio", "lr_warmup_steps"),
    "schedule": ("lr_scheduler_type", "lr_scheduler"),
    "total": ("num_training_steps", "total_training_steps"),
    "lora": ("peft_config", "lora_rank", "lora_r"),
    "minibatch": ("mini_batch_size", "ppo_mini_batch_size", "batch_size", "per_device_train_batch_size"),
    "micro_tokens": ("ppo_max_token_len_per_gpu", "micro_batch_size"),
    "epochs": ("ppo_epochs", "num_iterations", "num_ppo_epochs", "num_train_epochs", "num_epochs"),
    "clip": ("epsilon", "eps", "clip_ratio", "cliprange", "clip_range", "clip_ratio_low", "eps_clip"),
    "clip_high": ("epsilon_high", "clip_ratio_high"),
    "dual": ("clip_ratio_c", "delta"),
    "kl": ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef"),
    "kl_kind": ("kl_loss_type", "kl_estimator", "kl_penalty"),
    "entropy": ("entropy_coef", "entropy_coeff", "ent_coef"),
    "aggregate": ("loss_agg_mode", "loss_type", "reduction"),
    "lam": ("lambd", "gae_lambda", "lambda_"),
    "coef": ("beta", "kl_coef", "kl_ctl"),
    "turns": ("max_turns", "max_steps"),
    "fn": ("reward_func", "reward_funcs", "reward_fn"),
    "model": ("model_name_or_path", "model_path", "pretrain", "model_name"),
    "of": ("actor", "policy", "ref_model"),
}
#: Arguments and methods that say where something runs.
_PLACES = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "gpu_memory_utilization", "num_gpus"),
    *("tp", "pp", "dp", "device", "devices", "device_map", "mesh", "pool", "engine", "backend", "n_gpus_per_node"),
    *("to", "cuda", "cpu", "num_workers", "resources", "placement_group"),
)
#: What other libraries hand to a reward function, with what flowrl hands it.
_REWARDS = {
    "completions": "response",
    "completion": "response",
    "responses": "response",
    "solution_str": "response",
    "output": "response",
    "outputs": "response",
    "prompts": "prompt",
    "queries": "prompt",
    "query": "prompt",
    "prompt_str": "prompt",
}
PLACE = "Where a worker runs is said by a plan, --plan FILE: leave it out."


def meant_argument(name: str, known: Iterable[str]) -> str | None:
    """The argument among ``known`` that another library calls ``name``; None where there is none."""
    names = list(known)
    meant = [k for k, foreign in _ARGUMENTS.items() if name in foreign and k in names]
    return meant[0] if meant else None


def is_place(name: str) -> bool:
    """Whether an argument or a method says where something runs."""
    return name in _PLACES


def meant_column(name: str) -> str | None:
    """Return what a reward function is handed under the name that another library gives it."""
    return _REWARDS.get(name)
