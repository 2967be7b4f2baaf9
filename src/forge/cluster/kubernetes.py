"""`forge launch kubernetes`: a StatefulSet of workers, and a Job whose pod is the controller.

It needs no operator. Pods share a volume at `mount` for the code's data, models and the run's folder. The manifests are
checked against the schemas of Kubernetes; a cluster's scheduling, quotas and policies are its own.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from . import REQUEUE
from .wire import PORT

GRACE = 120  # seconds from SIGTERM to SIGKILL
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
        """What to create, in this order."""
        workers, own = f"{self.name}-workers", {"app.kubernetes.io/name": "forge", "forge/run": self.name}
        hosts = ",".join(f"{workers}-{number}.{workers}:{PORT}" for number in range(self.nodes))
        from_secret = {"secretKeyRef": {"name": f"{self.name}-secret", "key": "secret"}}
        shared_env = [{"name": "FORGE_SECRET", "valueFrom": from_secret}, {"name": "HOME", "value": "/tmp"}]
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
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        worker = common | {
            "name": "worker",
            "command": [self.python, "-m", "forge", "worker"],
            "args": ["--listen", f"$(POD_IP):{PORT}", "--grace", str(GRACE - 10)],
            "env": [*shared_env, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [{"name": "forge", "containerPort": PORT}],
            "resources": {"requests": amounts, "limits": amounts | devices},
            "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
            "startupProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2, "failureThreshold": 150},
        }
        controller = common | {
            "name": "controller",
            "command": self.command,
            "env": [
                *shared_env,
                {"name": "FORGE_HOSTS", "value": hosts},
                {"name": "FORGE_EXPECT_HOSTS", "value": str(self.nodes)},
            ],
            "resources": {"requests": amounts, "limits": amounts},
        }
        pod = {"volumes": volumes, "enableServiceLinks": False, "automountServiceAccountToken": False}
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
