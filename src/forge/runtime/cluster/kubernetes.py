"""`forge launch kubernetes`: a StatefulSet of workers, and a Job whose pod is the controller.

It needs no operator. Pods share a volume at `mount` for the code's data, models and the run's folder. The manifests are
checked against the schemas of Kubernetes; a cluster's scheduling, quotas and policies are its own.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from . import REQUEUE
from .wire import PORT
from .words import check_words

GRACE = 120  # seconds from SIGTERM to SIGKILL
USER = 1000  # who the processes are: the user of this library's images
LONGEST_NAME = 44  # characters: a StatefulSet NAME-workers has at most 52, for the labels of its pods
LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
RETRIES = 20  # failures of the controller's pod, beside those that ask to be continued


@dataclass(frozen=True)
class KubernetesJob:
    """One run.

    Args:
        command: of the controller, within the image.
        image: with this library, and the code of the run, at the same place in all pods.
        claim: name of a PersistentVolumeClaim, ReadWriteMany, for what the run shares; None: nothing is shared.
        mount: where it is mounted; relative paths of the configuration are in it.
        shm: size of /dev/shm, which holds up to three versions of the weights.
    """

    name: str
    command: list[str]
    image: str
    nodes: int = 1
    gpus_per_node: int = 0
    cpus: int = 4
    memory: str = "16Gi"
    shm: str = "16Gi"
    claim: str | None = None
    mount: str = "/work"
    python: str = "python"
    namespace: str = "default"

    def manifests(self, secret: str | None = None) -> list[dict[str, Any]]:
        """What to create, in this order.

        Raises:
            ValueError: Kubernetes takes no such name, image, amount or path, or a word has a NUL.
        """
        self._check()
        workers, own = f"{self.name}-workers", {"app.kubernetes.io/name": "forge", "forge/run": self.name}
        hosts = ",".join(f"{workers}-{number}.{workers}:{PORT}" for number in range(self.nodes))
        from_secret = {"secretKeyRef": {"name": f"{self.name}-secret", "key": "secret"}}
        shared_env = [
            {"name": "FORGE_SECRET", "valueFrom": from_secret},
            *named("HOME", "/tmp"),
            *named("USER", "forge"),
        ]
        amounts = {"cpu": str(self.cpus), "memory": self.memory}
        devices = {"nvidia.com/gpu": str(self.gpus_per_node)} if self.gpus_per_node else {}
        volumes: list[dict[str, Any]] = [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self.shm}},
            {"name": "tmp", "emptyDir": {}},
        ]
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}]
        if self.claim is not None:
            volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": self.claim}})
            mounts.append({"name": "shared", "mountPath": self.mount})
        common = {
            "image": self.image,
            "workingDir": self.mount,
            "volumeMounts": mounts,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                # Without a claim the run's folder is in the image's own.
                "readOnlyRootFilesystem": self.claim is not None,
            },
        }
        worker = common | {
            "name": "worker",
            "command": [literal(self.python), "-m", "forge", "worker"],
            "args": ["--listen", f"$(POD_IP):{PORT}", "--grace", str(GRACE - 10)],
            "env": [*shared_env, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [{"name": "forge", "containerPort": PORT}],
            "resources": {"requests": amounts, "limits": amounts | devices},
            "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
            "startupProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2, "failureThreshold": 150},
        }
        controller = common | {
            "name": "controller",
            "command": [*map(literal, self.command)],
            "env": [*shared_env, *named("FORGE_HOSTS", hosts), *named("FORGE_EXPECT_HOSTS", str(self.nodes))],
            "resources": {"requests": amounts, "limits": amounts},
        }
        pod = {
            "volumes": volumes,
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
        # Saved and to be continued, or taken away with its node: neither is a failure.
        retried = [
            {"action": "Ignore", "onExitCodes": {"containerName": "controller", "operator": "In", "values": [REQUEUE]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]

        def described(kind: str, version: str, name: str) -> dict[str, Any]:
            metadata = {"name": name, "namespace": self.namespace, "labels": own}
            return {"apiVersion": version, "kind": kind, "metadata": metadata}

        selected = own | {"forge/role": "worker"}
        return [
            described("Secret", "v1", f"{self.name}-secret")
            | {"type": "Opaque", "stringData": {"secret": secret or secrets.token_hex(32)}},
            described("Service", "v1", workers)
            | {
                "spec": {
                    "clusterIP": "None",
                    "publishNotReadyAddresses": True,
                    "selector": selected,
                    "ports": [{"name": "forge", "port": PORT}],
                }
            },
            described("StatefulSet", "apps/v1", workers)
            | {
                "spec": {
                    "serviceName": workers,
                    "replicas": self.nodes,
                    "podManagementPolicy": "Parallel",
                    "selector": {"matchLabels": selected},
                    "template": {
                        "metadata": {"labels": selected},
                        "spec": pod | {"terminationGracePeriodSeconds": GRACE, "containers": [worker]},
                    },
                }
            },
            described("Job", "batch/v1", self.name)
            | {
                "spec": {
                    "backoffLimit": RETRIES,
                    "podFailurePolicy": {"rules": retried},
                    "template": {
                        "metadata": {"labels": own | {"forge/role": "controller"}},
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

    def _check(self) -> None:
        check_words([*self.command, self.python])
        if re.fullmatch(LABEL, self.name) is None or not self.name[0].isalpha() or len(self.name) > LONGEST_NAME:
            raise ValueError(
                f"{self.name[:80]!a} cannot be the name of Kubernetes' objects: set run.name to at most {LONGEST_NAME} "
                "letters, digits and dashes, the first a letter and the last no dash"
            )
        quantity = r"[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?"
        for option, value, form, most in (
            ("namespace", self.namespace, LABEL, 63),
            ("claim", self.claim or "x", rf"{LABEL}(\.{LABEL})*", 253),
            ("image", self.image, r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", 1024),
            ("memory", self.memory, quantity, 32),
            ("shm", self.shm, quantity, 32),
            ("mount", self.mount, r"(?!.*/\.\.(/|$))/[^:]*", 1024),
        ):
            if re.fullmatch(form, value) is None or len(value) > most or not value.isprintable():
                raise ValueError(f"--{option} {value[:80]!a} is not what Kubernetes takes there")
        if not self.python or self.python.startswith("-"):
            raise ValueError(f"--python {self.python[:80]!a} is no program of the image")

    def create(self) -> list[str]:
        """Create all of it, with the configuration that kubectl uses, or a pod's own; returns what was created.

        Raises:
            ImportError: the client is not installed; says what to install. RuntimeError: the cluster did not accept
                one of them; says which, and why.
        """
        try:
            from kubernetes import client, config, utils
        except ImportError:
            raise ImportError(
                "`forge launch kubernetes` needs a client: pip install kubernetes, or use --dry-run "
                "and kubectl apply -f"
            ) from None
        try:
            config.load_config()
        except config.ConfigException as error:
            raise RuntimeError(f"no Kubernetes cluster is configured here: {error}") from None
        created: list[str] = []
        for manifest in self.manifests():
            what = f"{manifest['kind']} {manifest['metadata']['name']}"
            try:
                utils.create_from_dict(client.ApiClient(), manifest, namespace=self.namespace)
            except utils.FailToCreateError as error:
                why = "; ".join(f"{one.status} {one.reason}" for one in error.api_exceptions)
                raise RuntimeError(
                    f"{what} was not created: {why}; created before it: {created or 'nothing'}"
                ) from None
            created.append(what)
        return created


def literal(word: str) -> str:
    """A word of a container's command that Kubernetes leaves as it is: $(NAME) would be the value of a variable."""
    return word.replace("$", "$$")


def named(name: str, value: str) -> list[dict[str, str]]:
    """A variable of a container's environment."""
    return [{"name": name, "value": literal(value)}]
