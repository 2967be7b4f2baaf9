"""Settings of other libraries and their equivalents here: the table behind errors about unknown settings.

An equivalent is a key of the configuration (`grpo.n_samples`, or `KEY=VALUE` if only that value is), or a sentence.
"""

from collections.abc import Iterable, Sequence
from functools import reduce

from forge_compat.torchforge_keys import KEYS

BARE = ("training", "grpo", "dpo", "dataset", "generator", "async", "run")  # their keys are arguments of forge.train
MOST_SHOWN = 8  # settings that one message explains
GUIDES = {
    "TRL": "docs/start/from_trl.md",
    "verl": "docs/start/from_verl.md",
    "OpenRLHF": "docs/start/from_verl.md",
    "torchforge": "docs/start/from_torchforge.md",
    "TitanRL": "docs/start/from_torchforge.md",
}
ALWAYS = "nothing to set, it is always so"
TRL = {
    # The trainers' arguments.
    "args": "its fields are arguments of forge.train, sft and dpo, or keys of the YAML",
    "train_dataset": "dataset",
    "reward_funcs": "reward",
    "processing_class": "the model's own tokenizer is used; its template is dataset.chat_template",
    "tokenizer": "the model's own tokenizer is used; its template is dataset.chat_template",
    "callbacks": "on_step of forge.train: f(step, metrics), True ends the run",
    "compute_metrics": "on_step of forge.train, or forge.log in a reward",
    "formatting_func": "dataset.prompt_template, or rows made beforehand",
    "data_collator": "nothing to set, sequences are packed without padding",
    "ref_model": "services.ref_model",
    "model_name_or_path": "model",
    "model_init_kwargs": "training.dtype and generator.dtype",
    "torch_dtype": "training.dtype",
    "attn_implementation": "nothing to set, the fastest one that is exact is taken",
    "peft_config": "lora",
    "use_peft": "lora",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets",
    "load_in_4bit": "lora.quantize=nf4",
    # GRPO.
    # How many answers, and how long.
    "num_generations": "grpo.n_samples",
    "max_completion_length": "grpo.max_tokens",
    "max_new_tokens": "grpo.max_tokens",
    "max_prompt_length": "dataset.max_prompt_tokens",
    # The loss.
    "grpo.epsilon": "grpo.clip_low",
    "epsilon_high": "grpo.clip_high",
    "delta": "grpo.dual_clip",
    "scale_rewards": "grpo.normalize",
    "loss_type": "algorithm of forge.train; DPO has the sigmoid loss only",
    "importance_sampling_level": "algorithm=gspo",
    # How a batch is used.
    "num_iterations": "training.epochs",
    "steps_per_generation": "training.mini_batches",
    "generation_batch_size": "training.batch_size",
    "mask_truncated_completions": "a reward that gives None where completion.finish is length, or grpo.overlong_buffer",
    "sync_ref_model": "the reference stays as it is: unsupported",
    # Generation.
    "use_vllm": "generator.engine=vllm",
    "vllm_server_host": "nothing to set, generators are processes of the run",
    "vllm_max_model_length": "generator.max_seq_len",
    "vllm_mode": "colocated=true for colocate; servers are started by the run",
    "vllm_gpu_memory_utilization": "generator.vllm={gpu_memory_utilization: ...}",
    "vllm_tensor_parallel_size": "services.generator.procs",
    "vllm_importance_sampling_correction": "grpo.correction=truncate",
    "generation_kwargs": "grpo.top_p, top_k, repetition_penalty and stop",
    "environment_factory": "environment",
    "rollout_func": "environment",
    "chat_template_kwargs": "dataset.chat_options",
    "log_completions": ALWAYS,
    "shuffle_dataset": "dataset.shuffle",
    "disable_dropout": ALWAYS,
    "use_liger_kernel": "training.compile",
    "use_liger_loss": "training.compile",
    "top_entropy_quantile": "a loss that names entropy, docs/own_loop.md",
    # SFT and DPO.
    "max_length": "dataset.max_tokens",
    "max_seq_length": "dataset.max_tokens",
    "dataset_text_field": "dataset.text_field",
    "assistant_only_loss": "dataset.train_on=assistant",
    "completion_only_loss": ALWAYS,
    "packing": ALWAYS,
    "padding_free": ALWAYS,
    "precompute_ref_log_probs": ALWAYS,
    # transformers' arguments.
    "max_steps": "training.steps",
    "num_train_epochs": "dataset.epochs in SFT and DPO; RL has training.steps",
    "per_device_train_batch_size": "training.batch_size",
    "per_device_eval_batch_size": "eval.problems",
    "train_batch_size": "training.batch_size",
    # Optimiser and precision.
    "lr": "training.learning_rate",
    "lr_scheduler_type": "training.schedule",
    "warmup_ratio": "training.warmup_steps",
    "adam_beta1": "training.beta1",
    "adam_beta2": "training.beta2",
    "adam_epsilon": "training.epsilon",
    "optim": "training.optimizer",
    "bf16": "training.dtype=bfloat16",
    "fp16": "training.dtype=bfloat16",
    "deepspeed": "services.trainer.procs and parallelism",
    "fsdp": "services.trainer.procs and parallelism",
    # What is written, and when.
    "report_to": "metrics={wandb: {project: ...}} or tensorboard",
    "logging_steps": "nothing to set, every step is logged",
    "logging_first_step": "nothing to set, every step is logged",
    "logging_dir": "run.root and run.name",
    "num_completions_to_print": "metrics.rollouts",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "save_only_model": "checkpoint.every=0: the model is written at the end",
    "resume_from_checkpoint": 'resume="auto", or --resume auto',
    "load_best_model_at_end": "eval, see docs/configuration.md",
    "eval_steps": "eval.every",
    "eval_on_start": ALWAYS,
    "eval_strategy": "eval.every",
    "evaluation_strategy": "eval.every",
    "output_dir": "run.root and run.name",
    "run_name": "run.name",
    "overwrite_output_dir": "run.overwrite",
    "hub_model_id": "checkpoint.push_to_hub",
    "data_seed": "seed",
    "dataset_num_proc": "nothing to set, data is read alongside the training",
    "gradient_checkpointing_kwargs": "training.gradient_checkpointing",
    "dataloader_num_workers": "nothing to set, data is read alongside the training",
    "remove_unused_columns": "nothing to set, rewards get the columns that they name",
    "neftune_noise_alpha": "unsupported, omit it",
}
VERL = {
    # Whole paths, whose last part by itself means something else in other libraries.
    "data.train_files": "dataset.path",
    "data.val_files": "eval.path",
    "data.prompt_key": "dataset.prompt_field",
    "data.train_batch_size": "training.batch_size",
    "data.max_prompt_length": "dataset.max_prompt_tokens",
    "data.shuffle": "dataset.shuffle",
    "critic.optim.lr": "critic.learning_rate",
    "critic.model.path": "critic.model",
    "data.max_response_length": "grpo.max_tokens",
    "data.truncation": "dataset.too_long",
    "data.filter_overlong_prompts": "dataset.too_long=skip",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "training.gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": ALWAYS,
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "actor_rollout_ref.rollout.n": "grpo.n_samples",
    "actor_rollout_ref.rollout.temperature": "grpo.temperature",
    "actor_rollout_ref.rollout.top_p": "grpo.top_p",
    "actor_rollout_ref.rollout.top_k": "grpo.top_k",
    "actor_rollout_ref.rollout.name": "generator.engine",
    "actor_rollout_ref.actor.optim.lr": "training.learning_rate",
    "actor_rollout_ref.actor.clip_ratio": "grpo.clip_low and grpo.clip_high",
    "reward_model.path": "reward.verifiers",
    "custom_reward_function.path": "reward.functions",
    "custom_reward_function.name": "reward.functions",
    # Last parts of paths.
    "tensor_model_parallel_size": "services.generator.procs",
    "gpu_memory_utilization": "generator.vllm={gpu_memory_utilization: ...}",
    "ppo_mini_batch_size": "training.mini_batches",
    "ppo_micro_batch_size": "training.seq_len: micro-batches are packed by tokens",
    "ppo_micro_batch_size_per_gpu": "training.seq_len: micro-batches are packed by tokens",
    "ppo_max_token_len_per_gpu": "training.seq_len",
    "use_dynamic_bsz": ALWAYS,
    "ppo_epochs": "training.epochs",
    "clip_ratio_low": "grpo.clip_low",
    "clip_ratio_high": "grpo.clip_high",
    "clip_ratio_c": "grpo.dual_clip",
    "loss_agg_mode": "training.aggregation",
    "loss_mode": "algorithm",
    "multi_turn": "environment",
    # KL, entropy and advantages.
    "use_kl_loss": "grpo.beta, with services.ref_model: {}",
    "kl_loss_coef": "grpo.beta",
    "kl_loss_type": "grpo.kl: low_var_kl is k3, kl is k1, mse is k2",
    "use_kl_in_reward": "grpo.kl_in=reward",
    "kl_coef": "grpo.beta",
    "entropy_coeff": "training.entropy_coef",
    "adv_estimator": "algorithm",
    "log_prob_micro_batch_size_per_gpu": "training.seq_len: micro-batches are packed by tokens",
    "norm_adv_by_std_in_grpo": "grpo.normalize",
    "ulysses_sequence_parallel_size": "parallelism.context_parallel_degree",
    "param_offload": "training.cpu_offload",
    "optimizer_offload": "training.cpu_offload",
    # The section trainer, which is another one here.
    "n_gpus_per_node": "services.trainer.procs",
    "nnodes": "services.trainer.hosts",
    "save_freq": "checkpoint.every",
    "test_freq": "eval.every",
    "resume_mode": "--resume auto",
    "total_epochs": "training.steps",
    "total_training_steps": "training.steps",
    "logger": "metrics",
    "project_name": "metrics.wandb.project",
    "experiment_name": "run.name",
    "val_before_train": ALWAYS,
}
OPENRLHF = {
    # Models and data.
    "pretrain": "model",
    "reward_pretrain": "reward.verifiers",
    "remote_rm_url": "reward.functions",
    "prompt_data": "dataset.path",
    "input_key": "dataset.prompt_field",
    "label_key": "dataset.target_field",
    "input_template": "dataset.prompt_template",
    "apply_chat_template": "dataset.chat_template",
    # Rollouts and batches.
    "n_samples_per_prompt": "grpo.n_samples",
    "prompt_max_len": "dataset.max_prompt_tokens",
    "generate_max_len": "grpo.max_tokens",
    "rollout_batch_size": "training.batch_size",
    "micro_train_batch_size": "training.seq_len: micro-batches are packed by tokens",
    "micro_rollout_batch_size": "generator.slots",
    "max_epochs": "training.epochs",
    "num_episodes": "training.steps",
    # The algorithm.
    "actor_learning_rate": "training.learning_rate",
    "critic_learning_rate": "critic.learning_rate",
    "init_kl_coef": "grpo.beta",
    "kl_estimator": "grpo.kl",
    "advantage_estimator": "algorithm",
    "eps_clip": "grpo.clip_low and grpo.clip_high",
    "gamma": "grpo.discount, of ppo",
    "lambd": "grpo.trace, of ppo",
    # Placement and output.
    "vllm_num_engines": "services.generator.num_replicas",
    "colocate_all_models": "colocated",
    "zero_stage": "services.trainer.procs and parallelism",
    "packing_samples": ALWAYS,
    "use_wandb": "metrics.wandb.project",
    "ckpt_path": "run.root",
    "save_path": "run.root",
    "dynamic_filtering": "algorithm=dapo",
}
TORCHFORGE = {
    **{name: here for name, here in KEYS.items() if name != here},
    "hf_assets_path": "model",
    "ref_model": "services.ref_model",
    "replay_buffer": "async and training.batch_size",
    "group_size": "grpo.n_samples",
    "local_batch_size": "training.batch_size",
    "max_req_tokens": "dataset.max_prompt_tokens",
    "max_res_tokens": "grpo.max_tokens",
    "off_by_n": "async.max_policy_age",
    # Sections and their keys.
    "policy": "generator and grpo",
    "engine_args": "generator.vllm",
    "sampling_params": "grpo",
    "actors": "services",
    "provisioner": "cluster",
    "metric_logging": "metrics",
    "rollout_threads": "nothing to set, rollouts run ahead by async.max_policy_age",
    "revision": "dataset.subset",
    "lr_scheduler": "training.schedule",
    "dcp_path": "nothing to set, weights travel through shared memory",
    # Of each service.
    "health_poll_rate": "ping_timeout of the service, in seconds",
    "replica_max_concurrent_requests": "max_in_flight of the service",
    "return_first_rank_result": "nothing to set, route returns the first rank's value and call a list of all",
}
TITANRL = {
    # The loop.
    "async_loop": "training, grpo and async",
    "num_training_steps": "training.steps",
    "num_prompts_per_train_step": "training.batch_size",
    "num_samples_per_prompt": "grpo.n_samples",
    "max_offpolicy_steps": "async.max_policy_age",
    "target_offpolicy_steps": "async.max_policy_age",
    # Model, environment and trainer.
    "hf_assets_path": "model",
    "model_spec": "model",
    "rollouter": "environment",
    "renderer": "dataset.chat_template and dataset.chat_options",
    "rubric": "reward.functions and reward.weights",
    "generator_router": "nothing to set, an episode's turns go to one replica",
    "max_context_length": "generator.max_seq_len",
    "num_tokens_per_microbatch_per_dp_rank": "training.seq_len",
    "drop_zero_std_reward_groups": "nothing to set, they have no gradient and are left out",
    "batch_invariant": "nothing to set on a CPU; docs/resume.md has what is exact",
}
# Endpoints, methods and arguments of torchforge's services that have another name here.
ENDPOINTS = {
    "broadcast": "fanout, which is awaited",
    "stream": "fanout, or the streams of Generator",
    "cleanup": "service.shutdown()",
    "max_buffer_size": "capacity, at which add waits",
    "max_resample_count": "nothing to set, each item is taken once",
    "eviction_policy": "max_policy_age",
    "sample_policy": "order, fifo or random",
    "engine_args": "model and settings of vLLM: model, engine='vllm', vllm={...}",
    "sampling_params": "temperature, top_p, max_tokens; n is an argument of generate",
}
# Former keys of this library.
FORMER = "forge"
FORMER_KEYS = {
    "distill": "algorithm=distill, with grpo.reference for the teacher",
    "rollout": "grpo, which has the same keys",
    "serve": "forge serve MODEL: no run serves its policy",
    "min_p": "absent: generator.engine vllm has it as generator.vllm",
    "bad_words": "absent: generator.engine vllm has it as generator.vllm",
    "quantization": "absent: generator.engine vllm has it as generator.vllm",
    "read_every": "absent: omit it",
    "weight_deltas": "absent: whole versions travel, omit it",
    **dict.fromkeys(
        ("ping_timeout", "stall_after", "setup_timeout", "max_in_flight", "retries", "quarantine_after"),
        "an argument of options(...) in Python, in no file",
    ),
}
TABLES = {
    FORMER: FORMER_KEYS,
    "TRL": TRL,
    "verl": VERL,
    "OpenRLHF": OPENRLHF,
    "torchforge": TORCHFORGE,
    "TitanRL": TITANRL,
}


def find_setting(name: str, libraries: Iterable[str] = TABLES) -> tuple[str, str] | None:
    """Return the library that has a setting and its equivalent here; None if no table has it.

    Args:
        name: of the setting; of a dotted name, the last part is looked up if the whole name is in no table, and then
            the first part.
        libraries: in the order in which their tables are read.

    >>> find_setting("kl_coef")
    ('verl', 'grpo.beta')
    """
    # The whole name in all tables first, as it is more specific than its last part.
    for part in (name, name.rpartition(".")[2], name.partition(".")[0]):
        for library in libraries:
            if part in TABLES[library]:
                return library, TABLES[library][part]
    return None


def order_libraries(names: Sequence[str]) -> list[str]:
    """Return the libraries in descending order of how many of these settings they have.

    >>> order_libraries(["learning_rate", "group_size", "off_by_n"])[0]
    'torchforge'
    """
    parts = [{name, name.rpartition(".")[2]} for name in names]
    return sorted(TABLES, key=lambda library: sum(not part.isdisjoint(TABLES[library]) for part in parts), reverse=True)


def describe_setting(name: str, python: bool, libraries: Iterable[str] = TABLES) -> str:
    """Return a text on the equivalent of a setting here; "" if no table has it.

    Args:
        python: the setting was an argument in Python, where keys are without their section.

    >>> describe_setting("kl_coef", python=False)
    "verl's kl_coef is grpo.beta here"
    """
    entry = find_setting(name, libraries)
    if entry is None:
        return ""
    library, here = entry
    if library == FORMER:
        return f"{name} is now {here}"

    is_key = " " not in here
    if is_key and python and "." in here:
        path, _, value = here.partition("=")
        section, *keys = path.split(".")
        nested = reduce(lambda inner, key: f"{{{key!r}: {inner}}}", reversed(keys), repr(value) if value else "...")
        # Other sections are given as a whole, and several sections have these two keys.
        is_bare = section in BARE and path not in ("training.dtype", "dataset.max_tokens")
        here = f"{here.removeprefix(section + '.') if is_bare else f'{section}={nested}'} ({path} in YAML)"
    return f"{library}'s {name} is {here} here" if is_key else f"of {library}'s {name}, here: {here}"


def explain_names(names: Sequence[str], python: bool = False) -> str:
    """Return one line on all names that are settings of other libraries or former settings of this one; "" for none.

    Args:
        python: the names were arguments of `forge.train`, `sft` or `dpo`, which take keys without their section.
    """
    ordered = order_libraries(names)
    lines = [text for name in names if (text := describe_setting(name, python, ordered))]
    libraries = {entry[0] for name in names if (entry := find_setting(name, ordered)) is not None} - {FORMER}
    # The first keys of a whole file say enough.
    shown = [*lines[:MOST_SHOWN], f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else lines
    guides = ", ".join(sorted({GUIDES[library] for library in libraries}))
    # Several settings of torchforge are probably a whole file.
    if len(lines) > 1 and "torchforge" in libraries:
        guides += "; forge convert upstream FILE prints it with these keys"
    return f"{'; '.join(shown)}{f' ({guides})' if guides else ''}"
