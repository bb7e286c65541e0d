"""What an update reports."""

from __future__ import annotations


class Metrics(dict[str, float]):
    """What an update reports, as numbers by name: ``Metrics(loss=0.1, grad_norm=1.2)``.

    >>> metrics = fl.Metrics(loss=0.1, grad_norm=1.2)
    >>> metrics["loss"]
    0.1
    """

    def __getattr__(self, name: str) -> float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
