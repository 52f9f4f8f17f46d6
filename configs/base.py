"""Every knob of mdlm_jax, once, with its meaning; other configs are this one plus what differs."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The defaults; sizes fit two CPU cores."""
    config = ConfigDict()
    config.seed = 0  # every random draw of every program follows from it

    env = config.env = ConfigDict()
    env.name = "textworld_express"  # a key of envs/registry.py
    # One entry per kind of game: "name:parameter=value,..." in the engine's own words.
    env.games = ("coin:numLocations=4,numDistractorItems=1,includeDoors=0,limitInventorySize=0",)
    env.turns = 8  # actions per episode, at most
    env.workers = 2  # processes that host the real environment

    collect = config.collect = ConfigDict()
    collect.train_episodes = 3000  # played on the train fold with mixed actions
    collect.dev_episodes = 100
    collect.test_episodes = 150
    collect.expert_episodes = 10  # gold episodes of the train fold, for the policy's warm start
    collect.gold = 0.3  # chance that an action follows the gold path
    collect.valid = 0.35  # chance that it is a random valid action; the rest are invalid ones

    tokenizer = config.tokenizer = ConfigDict()
    tokenizer.vocab_size = (
        2048  # byte-level BPE, specials and phrases included; fewer if words run out
    )
    tokenizer.phrases = 128  # whole phrases that become one token, at most
    tokenizer.phrase_share = 0.3  # share of the episodes that a phrase must stand in

    world = config.world = ConfigDict()
    world.kind = "diffusion"  # or "autoregressive": the same model, data and budget
    # How diffusion is trained, a key of objectives.OBJECTIVES: "sdar"; "semi-ar", a rate for each
    # token; "wedlm", causal over reordered blocks, which also writes by a stream.
    world.objective = "sdar"
    world.block_length = 4  # tokens denoised together
    world.slot = 4  # what the world reads is filled up to a multiple of this many tokens
    world.denoising_steps = 4  # at most, per block
    world.strategy = "low_confidence_dynamic"  # a key of diffusion.strategies.STRATEGIES
    world.threshold = 0.9  # confidence that lets a token be kept at once (dynamic)
    world.stream = ConfigDict()  # of a world that is trained with "wedlm"
    world.stream.window = 4  # places that are looked at together
    world.stream.threshold = 0.4  # entropy in nats below which a token is kept at once
    world.stream.penalty = 0.02  # nats per place of distance to the first open one
    world.temperature = 0.0  # 0 = greedy
    world.max_tokens = 48  # per observation
    world.prompt = 112  # tokens of the prompt, at most
    world.context = 256  # tokens of prompt and turns together
    world.model = model(width=192, layers=4, heads=3, mlp=512)

    policy = config.policy = ConfigDict()
    policy.temperature = 1.0  # while rolling out
    policy.max_tokens = 8  # per action
    policy.prompt = 48  # tokens of the prompt, at most
    policy.context = 192  # tokens of prompt and turns together
    policy.model = model(width=128, layers=4, heads=2, mlp=384)

    sft = config.sft = ConfigDict()
    for what, steps, rows, length, every in (
        ("world", 800, 3, 480, 100),
        ("policy", 50, 4, 192, 25),
    ):
        part = sft[what] = ConfigDict()
        part.steps = steps  # updates
        part.rows = rows  # packed rows per update
        part.row_length = length  # tokens per packed row
        part.answer_length = 192  # tokens of answer blocks per packed row (diffusion's noisy copy)
        part.learning_rate = 0.02  # Muon's, for the layers; linear warm-up, then cosine to a tenth
        part.adam_learning_rate = 2e-3  # of embeddings and norms, same curve
        part.warmup = 0.05  # share of the steps
        part.rename = 0.6  # share of the episodes told with other content words (train/augment.py)
        part.weight_decay = 0.01
        part.clip_norm = 1.0  # global gradient norm
        part.eval_every = every  # steps between losses on the dev fold
        part.save_every = every  # steps between checkpoints
    # Lowest masking rate: p = (1 - eps) t + eps. SDAR has 1e-3; high rates teach a small model what
    # a whole masked block says, which its first pass is asked (as BD3-LM's clipped schedules do).
    sft.mask_eps = 0.5
    sft.mask_lower = 0.1  # "semi-ar": a token's masking rate is drawn from here
    sft.mask_upper = 0.9  # to here
    sft.mask_per_block = True  # "wedlm": a masking rate for each block, or else for each episode
    sft.mlm_weighting = "weighted"  # "wedlm": by 1 / rate, or "uniform"
    sft.ar_weight = 1.0  # "wedlm": of the next-token loss beside that of the masks
    sft.end_tokens = 1  # times that the last status of an episode is written (WeDLM's SFT: 8)
    sft.rename_below = 0.1  # content words stand in fewer than this share of the episodes

    rollout = config.rollout = ConfigDict()
    rollout.tasks = 8  # prompts per rollout
    rollout.group = 8  # rollouts per prompt
    rollout.turns = 8  # at most; <= env.turns

    grpo = config.grpo = ConfigDict()
    grpo.steps = 50  # rollouts, each followed by one update
    grpo.learning_rate = 1e-4
    grpo.clip_norm = 1.0
    grpo.loss_type = "dapo"  # a key of rl.loss.LOSS_TYPES (TRL's names)
    grpo.epsilon = 0.2  # lower clip
    grpo.epsilon_high = 0.28  # upper clip
    grpo.discount = 0.95  # what a success is worth with every turn that it comes later
    grpo.scale_rewards = "group"  # or "batch", "none"
    grpo.rename = 0.5  # share of the tasks dreamed with other content words (train/augment.py)
    grpo.num_iterations = 1  # updates per rollout
    grpo.micro_rows = 16  # rows per gradient piece; never changes the result
    grpo.save_every = 10  # steps between checkpoints
    grpo.eval_every = 10  # steps between plays of the real dev games
    grpo.eval_games = 100  # of them; the parameters that do best there are kept

    evaluate = config.evaluate = ConfigDict()
    evaluate.rows = 64  # generated together
    evaluate.world_samples = 300  # (state, action) pairs of the test fold
    evaluate.games = 100  # real test-fold games for the agent
    evaluate.temperature = 0.0  # of the agent; 0 = greedy
    evaluate.bootstrap = 2000  # resamples of the intervals

    mesh = config.mesh = ConfigDict()
    mesh.data = -1  # devices along each axis; -1 = all that are left
    mesh.fsdp = 1
    mesh.tensor = 1
    return config


def model(*, width: int, layers: int, heads: int, mlp: int) -> ConfigDict:
    """A decoder's shape (Qwen3's form); the vocabulary comes from the tokenizer."""
    shape = ConfigDict()
    shape.hidden_size = width
    shape.num_hidden_layers = layers
    shape.num_attention_heads = heads
    shape.num_key_value_heads = heads
    shape.head_dim = 64
    shape.intermediate_size = mlp
    shape.rope_theta = 10_000.0
    shape.rms_norm_eps = 1e-6
    shape.tie_word_embeddings = True
    shape.attention_bias = False
    return shape
