"""Optimiser, train state, and the one update that every program uses."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mdlm_jax.structs import Mean, TrainState


def warmup_cosine(peak: float, *, steps: int, warmup: float) -> optax.Schedule:
    """Linear warm-up over a share of the steps, then a cosine down to a tenth of the peak."""
    rise = max(1, int(steps * warmup))
    return optax.warmup_cosine_decay_schedule(0.0, peak, rise, max(steps, rise + 1), peak / 10)


def optimizer(
    learning_rate: float | optax.Schedule, *, clip_norm: float, weight_decay: float
) -> optax.GradientTransformation:
    """AdamW behind a global gradient-norm clip; matrices decay, norm weights do not."""
    decays = lambda params: jax.tree.map(lambda p: p.ndim > 1, _unstacked(params))  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(learning_rate, b2=0.98, weight_decay=weight_decay, mask=decays),
    )


def _unstacked(params: dict) -> dict:
    """One layer's view of the stacked layers, so that a stacked norm weight counts as a vector."""
    first = lambda path, p: p[0] if "layers" in [k.key for k in path] else p  # noqa: E731
    return jax.tree_util.tree_map_with_path(first, params)


def create(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def gradients(loss_fn: Callable, params: dict, pieces: object) -> tuple[dict, Mean, dict]:
    """Gradient of total / count over micro-batches, divided once at the end.

    `loss_fn(params, piece) -> (Mean, metrics: dict of Mean)`; `pieces` has a leading axis of pieces.
    """

    def one(carry, piece):
        (_, (loss, metrics)), grads = jax.value_and_grad(
            lambda p: (lambda out: (out[0].total, out))(loss_fn(p, piece)), has_aux=True
        )(params)
        new = (grads, loss, metrics)
        return jax.tree.map(jnp.add, carry, new), None

    first = jax.tree.map(lambda x: x[0], pieces)
    shapes = jax.eval_shape(loss_fn, params, first)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)  # noqa: E731
    start = (zeros(params), zeros(shapes[0]), zeros(shapes[1]))
    (grads, loss, metrics), _ = jax.lax.scan(one, start, pieces)
    scale = 1.0 / jnp.maximum(loss.count, 1.0)
    return jax.tree.map(lambda g: g * scale, grads), loss, metrics


def update(
    state: TrainState, pieces: object, *, loss_fn: Callable, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict]:
    """One optimiser step. Returns the new state and metrics, each a Mean."""
    grads, loss, metrics = gradients(loss_fn, state.params, pieces)
    norm = optax.global_norm(grads)
    changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    metrics = {"loss": loss, "grad_norm": Mean(norm, jnp.ones(())), **metrics}
    return TrainState(state.step + 1, params, opt_state), metrics
