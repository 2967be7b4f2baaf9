"""`forge launch kubernetes`: a StatefulSet of workers, and a Job whose pod is the controller.

No operator is needed. Pods share a volume at `mount` for the code's data, models and the run's folder. The manifests
are checked against the schemas of Kubernetes; scheduling, quotas and policies depend on the cluster.
"""

import re
import secrets

from forge.runtime.names import REQUEUE

from .wire import PORT, Json

# Seconds from SIGTERM to SIGKILL: time to write a checkpoint.
GRACE = 120
USER = 1000  # the user id of the processes in this library's images
MAX_NAME = 44  # characters: the name NAME-workers of a StatefulSet may have 52, as it is in labels of its pods
LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
RETRIES = 20  # failures of the controller's pod after which the Job fails
Manifest = dict[str, Json]


def make_manifests(
    name: str,
    command: list[str],
    image: str,
    nodes: int = 1,
    gpus_per_node: int = 0,
    cpus: int = 4,
    memory: str = "16Gi",
    shm: str = "16Gi",
    claim: str | None = None,
    mount: str = "/work",
    python: str = "python",
    namespace: str = "default",
    secret: str | None = None,
) -> list[Manifest]:
    """Return the Kubernetes objects of one run, in the order to create them.

    They are the Secret, the Service and the StatefulSet of the workers, and the Job.

    Args:
        name: of the Job, and the start of the names of the other objects.
        command: of the controller, within the image.
        image: with this library and the code of the run.
        nodes: number of pods with a worker.
        gpus_per_node: all GPUs of each pod.
        cpus: of each pod.
        memory: of each pod, such as "16Gi".
        shm: size of /dev/shm of each pod, which holds up to three versions of the weights.
        claim: name of a PersistentVolumeClaim, ReadWriteMany, for the files that the pods share; None if they share
            none.
        mount: where the claim is mounted, and the working directory of all processes.
        python: of the image.
        namespace: of the objects.
        secret: of the run; None for a random one.

    Raises:
        ValueError: Kubernetes takes no such name, image, amount or path.
    """
    if re.fullmatch(LABEL, name) is None or not name[0].isalpha() or len(name) > MAX_NAME:
        raise ValueError(
            f"{name[:80]!a} is not a valid name of Kubernetes objects: set run.name to at most {MAX_NAME} letters, "
            "digits and dashes, the first a letter and the last no dash"
        )

    quantity = r"[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?"
    # Kubernetes would reject a wrong value much later, in a message that does not name the option.
    for option, value, pattern, limit in (
        ("namespace", namespace, LABEL, 63),
        ("claim", claim or "x", rf"{LABEL}(\.{LABEL})*", 253),
        ("image", image, r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", 1024),
        ("memory", memory, quantity, 32),
        ("shm", shm, quantity, 32),
        ("mount", mount, r"(?!.*/\.\.(/|$))/[^:]*", 1024),
    ):
        if re.fullmatch(pattern, value) is None or len(value) > limit or not value.isprintable():
            raise ValueError(f"--{option} {value[:80]!a} is not a valid value for Kubernetes")

    if not python or python.startswith("-"):
        raise ValueError(f"--python {python[:80]!a} must be the path of a Python in the image")

    workers = f"{name}-workers"
    labels = {"app.kubernetes.io/name": "forge", "forge/run": name}

    # The pods of a StatefulSet are named NAME-0, NAME-1 and so on, so the hosts are known before they exist.
    hosts = ",".join(f"{workers}-{number}.{workers}:{PORT}" for number in range(nodes))
    from_secret = {"secretKeyRef": {"name": f"{name}-secret", "key": "secret"}}
    shared_env = [
        {"name": "FORGE_SECRET", "valueFrom": from_secret},
        *make_variable("HOME", "/tmp"),
        *make_variable("USER", "forge"),
    ]
    amounts = {"cpu": str(cpus), "memory": memory}
    devices = {"nvidia.com/gpu": str(gpus_per_node)} if gpus_per_node else {}
    # The name of each volume, its source, and where it is. Nothing is writable but the volumes, unless there is no
    # shared one for the run's folder.
    shared = ("shared", {"persistentVolumeClaim": {"claimName": claim}}, mount)
    volumes: list[tuple[str, Manifest, str]] = [
        ("shm", {"emptyDir": {"medium": "Memory", "sizeLimit": shm}}, "/dev/shm"),
        ("tmp", {"emptyDir": {}}, "/tmp"),
        *([] if claim is None else [shared]),
    ]

    common = {
        "image": image,
        "workingDir": mount,
        "volumeMounts": [{"name": name, "mountPath": path} for name, _, path in volumes],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            # Without a claim the run's folder is in the image's own.
            "readOnlyRootFilesystem": claim is not None,
        },
    }

    # Workers ask for all GPUs of their node; the controller asks for none.
    worker = common | {
        "name": "worker",
        "command": [escape_word(python), "-m", "forge", "worker"],
        "args": ["--listen", f"$(POD_IP):{PORT}", "--grace", str(GRACE - 10)],
        "env": [*shared_env, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "forge", "containerPort": PORT}],
        "resources": {"requests": amounts, "limits": amounts | devices},
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        "startupProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2, "failureThreshold": 150},
    }
    controller = common | {
        "name": "controller",
        "command": [*map(escape_word, command)],
        "env": [
            *shared_env,
            *make_variable("FORGE_HOSTS", hosts),
            *make_variable("FORGE_EXPECT_HOSTS", str(nodes)),
        ],
        "resources": {"requests": amounts, "limits": amounts},
    }
    pod = {
        "volumes": [{"name": name, **source} for name, source, _ in volumes],
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,  # may write to the volumes
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }

    # A controller that has saved its run to be continued, or has lost its node, does not count as failed.
    retried = [
        {"action": "Ignore", "onExitCodes": {"containerName": "controller", "operator": "In", "values": [REQUEUE]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]

    def make_header(kind: str, version: str, name: str) -> Manifest:
        return {
            "apiVersion": version,
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
        }

    worker_labels = labels | {"forge/role": "worker"}
    return [
        make_header("Secret", "v1", f"{name}-secret")
        | {"type": "Opaque", "stringData": {"secret": secret or secrets.token_hex(32)}},
        make_header("Service", "v1", workers)
        | {
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": worker_labels,
                "ports": [{"name": "forge", "port": PORT}],
            }
        },
        make_header("StatefulSet", "apps/v1", workers)
        | {
            "spec": {
                "serviceName": workers,
                "replicas": nodes,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": worker_labels},
                "template": {
                    "metadata": {"labels": worker_labels},
                    "spec": pod | {"terminationGracePeriodSeconds": GRACE, "containers": [worker]},
                },
            }
        },
        make_header("Job", "batch/v1", name)
        | {
            "spec": {
                "backoffLimit": RETRIES,
                "podFailurePolicy": {"rules": retried},
                "template": {
                    "metadata": {"labels": labels | {"forge/role": "controller"}},
                    "spec": pod
                    | {
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": GRACE,
                        "containers": [controller],
                    },
                },
            }
        },
    ]


def escape_word(word: str) -> str:
    """Return a word of a container's command escaped: Kubernetes replaces $(NAME) by the value of a variable.

    >>> escape_word("$(HOME)")
    '$$(HOME)'
    """
    return word.replace("$", "$$")


def make_variable(name: str, value: str) -> list[dict[str, str]]:
    """Return the entries for a variable in the environment of a container.

    >>> make_variable("HOME", "/tmp")
    [{'name': 'HOME', 'value': '/tmp'}]
    """
    return [{"name": name, "value": escape_word(value)}]
