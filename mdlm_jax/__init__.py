"""mdlm_jax: masked diffusion language models as steerable text worlds, and agents trained inside them."""
