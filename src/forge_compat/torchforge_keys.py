"""Keys of Meta's torchforge: `KEYS` has the equivalents here, and `NOTES` the reasons why a key has none."""

import re

# Sections of TorchTitan, at the top of a file of SFT and within `trainer` in one of RL.
TITAN = {
    "optimizer.lr": "training.learning_rate",
    "optimizer.eps": "training.epsilon",
    "optimizer.beta1": "training.beta1",
    "optimizer.beta2": "training.beta2",
    "optimizer.weight_decay": "training.weight_decay",
    "lr_scheduler.warmup_steps": "training.warmup_steps",
    "lr_scheduler.decay_type": "training.schedule",
    "lr_scheduler.min_lr_factor": "training.min_lr_ratio",
    "training.seq_len": "training.seq_len",
    "training.max_norm": "training.max_grad_norm",
    "training.steps": "training.steps",
    "training.dtype": "training.dtype",
    "training.compile": "training.compile",
    "compile.enable": "training.compile",
    "checkpoint.interval": "checkpoint.every",
    **{
        f"parallelism.{name}_degree": f"parallelism.{name}_degree"
        for name in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "expert_parallel",
        )
    },
}
PLACEMENT = ("procs", "num_replicas", "hosts", "with_gpus")
SERVICES = {
    "services.policy": "services.generator",
    "services.ref_model": "services.ref_model",
    "services.reward_actor": "services.reward",
    "actors.trainer": "services.trainer",
    "processes": "services.trainer",
}
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop")
KEYS = {
    "model": "model",
    "model_name": "model",
    "group_size": "grpo.n_samples",
    "max_req_tokens": "dataset.max_prompt_tokens",
    "max_res_tokens": "grpo.max_tokens",
    "off_by_n": "async.max_policy_age",
    "replay_buffer.max_policy_age": "async.max_policy_age",
    "replay_buffer.seed": "seed",
    "dataset.path": "dataset.path",
    # torchforge passes it to `load_dataset` as the name of a configuration: gsm8k's is "main".
    "dataset.revision": "dataset.subset",
    "dataset.data_split": "dataset.split",
    "dataset.streaming": "dataset.streaming",
    "metric_logging.wandb.project": "metrics.wandb.project",
    "metric_logging.wandb.group": "metrics.wandb.group",
    "metric_logging.wandb.name": "metrics.wandb.name",
    "metric_logging.wandb.entity": "metrics.wandb.entity",
    **{f"policy.{section}.n": "grpo.n_samples" for section in ("sampling_params", "sampling_config")},
    **{
        f"policy.{section}.{name}": f"grpo.{name}"
        for section in ("sampling_params", "sampling_config")
        for name in SAMPLING
    },
    **{f"{prefix}{name}": target for name, target in TITAN.items() for prefix in ("", "trainer.")},
    **{f"{name}.{option}": f"{target}.{option}" for name, target in SERVICES.items() for option in PLACEMENT},
}
# Why a key has no equivalent, by prefixes of keys: one that ends with a dot is for a section. The longest that fits is
# used.
NOTES = {
    "": "no equivalent",
    "local_batch_size": "part of training.batch_size, which counts prompts",
    "batch_size": "part of training.batch_size, which counts prompts",
    "rollout_threads": "rollouts run ahead as far as async.max_policy_age",
    "training_threads": "one loop trains",
    "provisioner.": "forge launch slurm FILE, or the section cluster",
    "launcher": "forge launch slurm FILE, or the section cluster",
    "job_name": "run.name",
    "checkpoint_folder": "checkpoints are in run.root/run.name",
    "comm.": "communication has no settings here",
    "dataset.model": "the tokenizer is the model's own",
    "metric_logging.console.": "the console always has a line for each step",
    "metric_logging.wandb.": "metrics are merged over all ranks",
    "policy.": "vLLM's own arguments are keys of generator.vllm",
    "model.": "the architecture is read from the model's config.json",
    "trainer.model.": "the architecture is read from the model's config.json",
    "optimizer.": "AdamW; training.optimizer has the choices",
    "lr_scheduler.": "training.schedule and training.min_lr_ratio",
    "training.local_batch_size": "part of training.batch_size",
    "training.gc_freq": "no garbage collection by steps is needed",
    "training.dataset": "dataset.path",
    "parallelism.disable_loss_parallel": "the loss never gathers logits",
    "checkpoint.enable": "checkpoint.every: 0 writes none",
    "checkpoint.folder": "checkpoints are in run.root/run.name",
    "checkpoint.initial_load": "training starts from model",
    "checkpoint.last_save_in_hf": "the last model is always exported in Hugging Face format",
    "checkpoint.async_mode": "checkpoint.async_write",
    "activation_checkpoint.": "training.gradient_checkpointing",
    "replay_buffer.batch_size": "part of training.batch_size, which counts prompts",
    "replay_buffer.dp_size": "ranks divide a batch themselves",
    "ref_model.": "the reference is the model at its start, with the trainer's dtype and parallelism",
    "actors.dataset.": "in the controller's process; services.dataset starts one",
    "actors.replay_buffer.": "in the controller's process; services.replay_buffer starts one",
    "actors.compute_advantages.": "advantages are the algorithm's, in the controller",
    "datasets.": "dataset, and dataset.sources for several",
    "eval.": "eval has other keys, docs/configuration.md",
}
ENGINE = re.compile(r"policy\.engine_(?:args|config)\.(.+)")  # vLLM's arguments, by its newer name and its older one
# Those of vLLM's arguments that have a key for every engine here.
ENGINE_KEYS = {"max_num_seqs": "slots", "max_model_len": "max_seq_len", "dtype": "dtype"}
# Value of training.gradient_checkpointing for TorchTitan's modes of activation checkpointing.
RECOMPUTED = {"none": False, "selective": True, "full": True, "memory_budget": True}
MESH = "services have the names of their sections"
# Settings that torchforge's program for RL has in its code.
PROGRAM = {
    "reward": {"functions": ["MathReward", "ThinkingReward"]},
    "dataset.target_pattern": r"####\s*(.+)",
    "dataset.chat_template": True,
    "dataset.system_prompt": "Reason between <think> and </think>, then answer between <answer> and </answer>.",
    "grpo.beta": 0.1,
}
ALPACA = "yahma/alpaca-cleaned"  # of torchforge's apps/sft/main.py
