"""Optimiser, train state, and the one update that every program uses."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from mdlm_jax.structs import Mean, TrainState


def warmup_cosine(peak: float, *, steps: int, warmup: float) -> optax.Schedule:
    """Linear warm-up over a share of the steps, then a cosine down to a tenth of the peak."""
    rise = max(1, int(steps * warmup))
    return optax.warmup_cosine_decay_schedule(0.0, peak, rise, max(steps, rise + 1), peak / 10)


def optimizer(
    learning_rate: float | optax.Schedule, *, clip_norm: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW behind a global gradient-norm clip; matrices decay, norm weights do not."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, b2=0.98, weight_decay=weight_decay, mask=matrices),
    )


def matrices(params: dict) -> dict:
    """True where a parameter is a matrix. The axis of stacked layers does not count."""

    def is_matrix(path, param):
        is_stacked = "layers" in [part.key for part in path]
        return param.ndim - is_stacked > 1

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def muon(
    learning_rate: optax.Schedule,
    *,
    adam_learning_rate: optax.Schedule,
    clip_norm: float,
    weight_decay: float,
) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices of the layers, AdamW for embeddings and norms.

    From scratch it learns to copy from the context in half the steps that AdamW takes.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.contrib.muon(
            learning_rate,
            adam_learning_rate=adam_learning_rate,
            adam_b2=0.98,
            weight_decay=weight_decay,
            muon_weight_dimension_numbers=_matrices,
        ),
    )


def _matrices(params: dict) -> dict:
    """Which axes of a stacked kernel [N, in, out] form a matrix; None for everything else.

    The few taps of a short convolution are no matrix, whatever their number of axes.
    """
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    def one(path, leaf):
        is_projection = path[-1].key == "kernel" and path[-2].key != "conv"
        return matrix if is_projection and leaf.ndim == 3 else None

    return jax.tree_util.tree_map_with_path(one, params)


def create(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0."""
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params)
    )


def gradients(loss_fn: Callable, params: dict, pieces: object) -> tuple[dict, Mean, dict]:
    """Gradient of total / count over micro-batches, divided once at the end.

    `loss_fn(params, piece) -> (Mean, metrics: dict of Mean)`; `pieces` have a leading axis. The
    counts must not depend on the parameters. Where the loss is the sum of several means, one
    backward pass serves them all: their gradients are added in the right shares at once.
    """
    share = shares(loss_fn, params, pieces)

    def total(params, piece):
        loss, metrics = loss_fn(params, piece)
        return jnp.sum(share * loss.total), (loss, metrics)

    def add(sums, piece):
        grads, (loss, metrics) = jax.grad(total, has_aux=True)(params, piece)
        return jax.tree.map(jnp.add, sums, (grads, loss, metrics)), None

    first = jax.tree.map(lambda x: x[0], pieces)
    shapes = (params, *jax.eval_shape(loss_fn, params, first))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, loss, metrics), _ = jax.lax.scan(add, zeros, pieces)
    scale = 1.0 / jnp.maximum(jnp.max(loss.count), 1.0)
    return jax.tree.map(lambda g: g * scale, grads), loss, metrics


def shares(loss_fn: Callable, params: dict, pieces: object) -> jax.Array | float:
    """What each of a loss's totals weighs, f32[K], when all are divided by the largest count.

    Only the counts of all pieces are asked for, so no forward pass is left in the compiled program.
    """

    def add(count, piece):
        return count + loss_fn(params, piece)[0].count, None

    first = jax.tree.map(lambda x: x[0], pieces)
    shape = jax.eval_shape(loss_fn, params, first)[0].count
    if not shape.shape:
        return 1.0
    count, _ = jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), pieces)
    return jnp.max(count) / jnp.maximum(count, 1.0)


def update(
    state: TrainState, pieces: object, *, loss_fn: Callable, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict]:
    """One optimiser step. Returns the new state and metrics, each a Mean."""
    grads, loss, metrics = gradients(loss_fn, state.params, pieces)
    norm = optax.tree.norm(grads)
    changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    metrics = {"loss": loss, "grad_norm": Mean(norm, jnp.ones(())), **metrics}
    return TrainState(state.step + 1, params, opt_state), metrics
