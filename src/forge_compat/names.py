"""Public names of Meta's torchforge that are not in the same module here: what they are, or what replaces them.

`docs/torchforge_names.tsv` has all of its names; `scripts/describe_names.py` writes it.
"""

from typing import Any

from forge.config.plugin import resolve

GUIDE = "docs/start/from_torchforge.md"

# Names that modules of torchforge have, and the objects here.
HERE = {
    "TitanTrainer": "forge_compat.actors:TitanTrainer",
    "RLTrainer": "forge_compat.actors:TitanTrainer",
    "ReferenceModel": "forge_compat.actors:ReferenceModel",
    "LauncherConfig": "forge_compat.launcher:LauncherConfig",
    "ProvisionerConfig": "forge_compat.launcher:ProvisionerConfig",
    "init_provisioner": "forge_compat.launcher:init_provisioner",
    "ServiceConfig": "forge.runtime.controller:ServiceConfig",
    "ProcessConfig": "forge.runtime.controller:ServiceConfig",
    "ServiceInterface": "forge.runtime.controller:Service",
    "Session": "forge.runtime.controller.handle:Session",
    "SessionContext": "forge.runtime.controller.handle:Session",
    "ServiceEndpoint": "forge.runtime.controller.handle:Endpoint",
    "ServiceMetrics": "forge_compat.verbs:ServiceMetrics",
    "ReplicaMetrics": "forge_compat.verbs:ReplicaMetrics",
    "get_or_create_metric_logger": "forge_compat.upstream.metric_actors:get_or_create_metric_logger",
    "Tracer": "forge_compat.upstream.perf_tracker:Tracer",
    "trace": "forge_compat.upstream.perf_tracker:trace",
    "Scalar": "forge_compat.upstream:Scalar",
    "SandboxedPythonCoder": "forge_sandbox:SandboxedPythonCoder",
}

COLLECTORS = "metrics of all processes are merged by the controller: record_metric, and drain_metrics"
TRACKER = "a class of your own as metrics.tracker: module:Class (docs/watching.md)"
PLACEMENT = "Component.options(procs=..., with_gpus=..., hosts=...), which starts processes itself"
ROUTER = "options(router=...), a name or a function (forge.runtime.controller.routers)"
LAUNCH = "forge launch slurm | kubernetes | ssh CONFIG, or a Monarch job as options(hosts=...)"
TOKENIZER = "forge.models.tokenizer.open_tokenizer, or transformers.AutoTokenizer"
WORKERS = "the engine starts its own processes: generator.engine vllm"

# Names of torchforge without an equivalent object, and what replaces them.
REPLACED = {
    # Actors.
    **dict.fromkeys(("GeneratorWorker", "WorkerRegistry"), WORKERS),
    "BufferEntry": "forge.types.Episode or an item of your own",
    "age_evict": "max_policy_age of ReplayBuffer",
    "random_sample": "ReplayBuffer(order='random')",
    # The controller.
    **dict.fromkeys(
        ("get_proc_mesh", "host_mesh_from_proc", "stop_proc_mesh", "Provisioner", "GpuManager", "EnvSetter"), PLACEMENT
    ),
    **dict.fromkeys(
        ("get_remote_info", "get_host_gpus", "set_environment", "register_service", "register_actor"), PLACEMENT
    ),
    **dict.fromkeys(("Router", "LeastLoadedRouter", "RoundRobinRouter", "SessionRouter"), ROUTER),
    **dict.fromkeys(
        ("ServiceActor", "ServiceInterfaceV2", "ServiceEndpointV2", "ServiceRequest", "ReplicaState"),
        "Service, and its status()",
    ),
    **dict.fromkeys(("spawn_service_v2", "shutdown_service_v2"), "Component.as_service, service.shutdown"),
    **dict.fromkeys(("Launcher", "BaseLauncher", "Slurmlauncher", "MastLauncher", "get_launcher"), LAUNCH),
    "shutdown_metric_logger": "forge.runtime.controller.shutdown, which ends the loggers",
    # Data.
    "Message": "a dict with role and content",
    "Observation": "what an environment returns (forge.envs)",
    "from_request_output": "Completion(text, token_ids, logprobs)",
    "prompt_to_messages": "messages in a row",
    "collate_packed": "forge.data.packing",
    "CROSS_ENTROPY_IGNORE_IDX": "the mask of an episode or a row",
    **dict.fromkeys(("MetricTransform", "DefaultDatasetMetricTransform"), "record_metric in a reward or an actor"),
    **dict.fromkeys(("Prompt", "Role", "to_prompt"), "forge.types.Prompt, or messages in a row"),
    **dict.fromkeys(("BaseTokenizer", "HuggingFaceBaseTokenizer", "HuggingFaceModelTokenizer"), TOKENIZER),
    "LanguageReward": "a function reward(prompt, response, target) of your own",
    # Metrics.
    **dict.fromkeys(("LoggerBackend", "ConsoleBackend", "WandbBackend", "get_logger_backend_class"), TRACKER),
    **dict.fromkeys(("GlobalLoggingActor", "LocalFetcherActor", "MetricCollector"), COLLECTORS),
    **dict.fromkeys(("BackendRole", "LoggingMode"), COLLECTORS),
    **dict.fromkeys(("Metric", "MetricAccumulator", "reduce_metrics_states"), COLLECTORS),
    **dict.fromkeys((f"{kind}Accumulator" for kind in ("Mean", "Sum", "Max", "Min", "Std")), COLLECTORS),
    "get_proc_name_with_rank": "forge.runtime.controller.ActorContext, as self.context",
    # Helpers.
    **dict.fromkeys(("SharedTensor", "SharedTensorHandle"), "weights are shared in memory by forge.runtime.store"),
    "ForgeRecipeArgParser": "forge.util.config.parse",
    "resolve_hf_hub_paths": "nothing to call: hf:// is removed, and models are downloaded when they are opened",
}


def find_name(name: str) -> Any:
    """Return the object for a public torchforge name that the requested module does not have.

    Raises:
        AttributeError: torchforge has no such name.
        ImportError: it has, and here is no such object; the message says what replaces it.
    """
    if name in HERE:
        return resolve(HERE[name], "name")
    if name in REPLACED:
        raise ImportError(
            f"{name} is a name of Meta's torchforge that forge replaces by: {REPLACED[name]} ({GUIDE})", name=name
        )
    raise AttributeError(f"there is no {name!r} here")
