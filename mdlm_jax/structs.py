"""Values that cross a file, one dataclass each.

Dimension key, used in comments, docstrings and variable suffixes everywhere:

    B rows = prompts x G      G group            L sequence       M masked copy of L
    W window of one turn      T turns            V vocabulary     N layers
    D width                   H heads            J key/value heads
    K head width              C cache            S steps
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import struct


@struct.dataclass
class TokenBatch:
    """Packed training rows. A row holds several episodes ("segments"), one after the other."""

    tokens: jax.Array  # i32[B, L]
    segment: jax.Array  # i32[B, L]   1, 2, ... per episode; 0 = padding
    position: jax.Array  # i32[B, L]  counted from 0 inside each segment
    loss_mask: jax.Array  # bool[B, L] tokens that the model is trained to write
    answer_index: (
        jax.Array
    )  # i32[B, M] places in L of whole blocks that hold a trained token; -1 = none


class CacheShape(NamedTuple):
    """What one row's cache takes, apart from its number of places C."""

    layers: int  # N, of attention
    heads: int  # J
    width: int  # K
    conv_layers: int = 0
    conv_taps: int = 0
    conv_width: int = 0  # D


@struct.dataclass
class Cache:
    """Keys and values of the tokens read so far, one place per position, and what short
    convolutions need of the last ones. In a model's fresh cache the window W stands for C."""

    key: jax.Array  # f[N, B, J, C, K]  a head's keys lie together, as its products want them
    value: jax.Array  # f[N, B, J, C, K]
    conv: jax.Array | None = None  # f[conv layers, B, taps, D]  inputs of the last cached tokens


@struct.dataclass
class Context:
    """What one model has read and written so far. Ids are appended once and never re-tokenised."""

    tokens: jax.Array  # i32[B, C]
    length: jax.Array  # i32[B]  tokens in the context
    cached: jax.Array  # i32[B]  leading tokens whose keys and values are in the cache
    cache: Cache


@struct.dataclass
class Message:
    """One turn's text as ids, left aligned."""

    tokens: jax.Array  # i32[B, W]
    length: jax.Array  # i32[B]  0 = nothing was said (an idle row)


@struct.dataclass
class Generation:
    """What a model wrote in one turn, up to and including its first stop token, left aligned.

    Behind `length` everything is 0; only where a plan denoises whole blocks, the rest of the last
    block stands there, as it was needed to replay the passes.
    """

    tokens: jax.Array  # i32[B, W]
    length: jax.Array  # i32[B]
    sampled: jax.Array  # bool[B, W]  chosen by the model: neither forced nor padding
    logprobs: jax.Array  # f32[B, W]  of each token at the moment it was chosen; 0 where not sampled
    order: jax.Array  # i32[B, W]  forward pass (1-based) that chose the token; 0 = none did
    stopped: jax.Array  # bool[B]  a stop token was written
    forwards: jax.Array  # i32[B]  forward passes spent choosing tokens
    commits: jax.Array  # i32[B]  further passes that only wrote finished blocks to the cache
    fed: jax.Array  # i32[B]  tokens that went through the model in all these passes


class Speaker(NamedTuple):
    """One side of the dialogue. Policy and world have this one type, whatever model is inside.

    Rows that are not active neither read nor write.
    """

    begin: Callable  # (params, Message[P], Context[B], group) -> Context[B]  reads the prompts
    read: Callable  # (params, Context, Message) -> Context
    write: Callable  # (params, keys[B], Context, active bool[B]) -> (Generation, Context)


@struct.dataclass
class Tasks:
    """Start of each episode, for both sides. Only the world sees the hidden state."""

    policy: Message  # of P rows
    world: Message  # of P rows


@struct.dataclass
class Rollout:
    """Episodes that a policy played inside a world model, as the policy's own token stream."""

    tokens: jax.Array  # i32[B, L]
    length: jax.Array  # i32[B]
    action_mask: jax.Array  # bool[B, L]  tokens the policy sampled
    logprobs: jax.Array  # f32[B, L]  of sampled tokens when they were sampled; 0 elsewhere
    reward: jax.Array  # f32[B]
    success: jax.Array  # bool[B]
    turns: jax.Array  # i32[B]  turns that were played
    done: jax.Array  # bool[B]  the world said that the episode ended
    truncated: jax.Array  # bool[B]  an action or the context met its length limit
    invalid: jax.Array  # bool[B]  the world model failed to answer; the row carries no signal
    actions: Generation  # every field with a leading [T]
    observations: Generation  # every field with a leading [T]


@struct.dataclass
class Mean:
    """A mean kept as its parts, so that micro-batches, turns and hosts never change the result.

    A loss of K terms is K means side by side, each divided by its own count before they are added.
    """

    total: jax.Array  # f32[] or f32[K]
    count: jax.Array  # f32[] or f32[K]

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)


@struct.dataclass
class TrainState:
    """Everything an update changes."""

    step: jax.Array  # i32[]
    params: dict
    opt_state: tuple
