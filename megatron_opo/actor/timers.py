"""What Megatron says of its schedule, as spans: each pass, and each exchange between stages."""

from dataclasses import dataclass

from megatron_opo.spans import Spans


@dataclass(frozen=True)
class Timer:
    """Of one name; Megatron nests what it starts."""

    spans: Spans
    name: str

    def start(self, barrier: bool = False) -> None:
        """Ranks do not wait for each other, whatever Megatron asks: that would cost time."""
        self.spans.begin(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.spans.end()


@dataclass(frozen=True)
class MegatronTimers:
    """For the field `timers` of Megatron's configurations."""

    spans: Spans

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        if "-grads-" in name:  # one reduction after the other, of all gradients and of single ones
            return Timer(self.spans, "reduce_gradients")
        return Timer(self.spans, name.removesuffix("-compute").replace("-", "_"))
