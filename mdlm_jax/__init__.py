"""mdlm_jax: masked diffusion language models as text worlds, and agents trained inside them."""
