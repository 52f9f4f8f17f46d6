"""The shape of a decoder. Field names are Hugging Face's; what a family fixes is a field too."""

import dataclasses
from itertools import groupby

from mdlm_jax.models.rope import Scaling
from mdlm_jax.structs import CacheShape

MIXERS = ("full_attention", "sliding_attention", "conv")
FEED_FORWARDS = ("dense", "experts")


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring layers of one form: their parameters are stacked and scanned."""

    mixer: str  # "attention" or "conv"
    feed_forward: str  # of FEED_FORWARDS
    start: int  # first layer
    length: int  # layers

    @property
    def layers(self) -> range:
        """The numbers of the run's layers."""
        return range(self.start, self.start + self.length)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a decoder's parameters and its numbers; hashable, so static."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qk_norm: bool = True  # RMSNorm over the head width of queries and keys, before RoPE
    attention_bias: bool = False  # of the query, key and value projections
    attention_out_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] = ()  # of MIXERS, one per layer; () = full attention everywhere
    sliding_window: int | None = None  # keys that a "sliding_attention" layer sees, itself included
    conv_L_cache: int = 3  # taps of a "conv" layer
    conv_bias: bool = False
    feed_forwards: tuple[str, ...] = ()  # of FEED_FORWARDS, one per layer; () = dense everywhere
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True

    @property
    def mixers(self) -> tuple[str, ...]:
        """The kind of every layer's mixer, of MIXERS."""
        return self.layer_types or ("full_attention",) * self.num_hidden_layers

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers in runs of one form. Full and sliding attention differ by a number only."""
        forms = [
            ("conv" if mixer == "conv" else "attention", feed_forward)
            for mixer, feed_forward in zip(
                self.mixers,
                self.feed_forwards or ("dense",) * self.num_hidden_layers,
                strict=True,
            )
        ]
        runs, start = [], 0
        for form, same in groupby(forms):
            runs.append(Run(*form, start=start, length=len(list(same))))
            start += runs[-1].length
        return tuple(runs)

    @property
    def cache_shape(self) -> CacheShape:
        """What one row's cache takes."""
        attention = sum(mixer != "conv" for mixer in self.mixers)
        return CacheShape(
            layers=attention,
            heads=self.num_key_value_heads,
            width=self.head_dim,
            conv_layers=self.num_hidden_layers - attention,
            conv_taps=self.conv_L_cache,
            conv_width=self.hidden_size,
        )
