"""A stand-in for Kubernetes whose pods are machines: no API server can be installed from PyPI, npm or Debian.

It answers what the real Python client sends, over https with a token, checks every object strictly against Kubernetes'
own schemas, and does what the StatefulSet and Job controllers, the kubelet, the DNS of pods, and the operator of
Monarch's meshes would do. It knows no scheduling, quotas, admission or RBAC.
"""

import ctypes
import json
import os
import re
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tests.forge_cluster.machines import Machine, Machines, inside

VERSION = "1.37.0"
TOKEN = "of-the-tests"
ACCOUNT = Path("/run/secrets/kubernetes.io/serviceaccount")
INDEX = "apps.kubernetes.io/pod-index"
MESH = "monarch.pytorch.org/mesh-name"


def listening(machine: Machine, port: int) -> socket.socket:
    """A socket in that machine's network, served by this process: a thread may enter a network by itself."""
    found: list[socket.socket] = []

    def enter() -> None:
        with open(f"/proc/{machine.pid}/ns/net") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0) == 0:
                found.append(socket.create_server((machine.address, port)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


def expanded(words: list[str], variables: dict[str, str]) -> list[str]:
    """What the kubelet makes of a command: $(NAME) is the value of a variable that there is, $$ is $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", value, word) for word in words]


class Cluster:
    """The objects that were created, and the pods that run for them: workers on all machines but the first.

    `image` is the environment of every container.
    """

    def __init__(self, lab: Machines, folder: Path, image: dict[str, str] | None = None) -> None:
        self.lab, self.folder = lab, folder
        self.image = {"PATH": os.environ["PATH"]} if image is None else image
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, list[tuple[subprocess.Popen, dict[str, Any]]]] = {}  # of Monarch's meshes
        self.codes: list[int] = []  # of the controller's pods
        self.starter = ThreadPoolExecutor(1)
        certify = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        certify += ["-days", "1", "-subj", "/CN=kube", "-addext", f"subjectAltName=IP:{lab[0].address}"]
        certify += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.pem")]
        subprocess.run(certify, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.pem", folder / "key.pem")
        server = ThreadingHTTPServer(("", 0), handler(self), bind_and_activate=False)
        server.socket = context.wrap_socket(listening(lab[0], 6443), server_side=True)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
            "users": [{"name": "lab", "user": {"token": TOKEN}}],
            "clusters": [
                {
                    "name": "lab",
                    "cluster": {
                        "server": f"https://{lab[0].address}:6443",
                        "certificate-authority": str(folder / "ca.pem"),
                    },
                }
            ],
        }
        (folder / "kubeconfig").write_text(json.dumps(config))

    def account(self, machine: Machine, environment: dict[str, str]) -> dict[str, str]:
        """Give a machine what a pod's service account has; the environment of its programs."""
        for name, text in (("token", TOKEN), ("ca.crt", (self.folder / "ca.pem").read_text()), ("namespace", "lab")):
            words = ["sh", "-c", f'mkdir -p {ACCOUNT}; printf %s "$0" >{ACCOUNT / name}', text]
            machine.run(words, check=True)
        server = {"KUBERNETES_SERVICE_HOST": self.lab[0].address, "KUBERNETES_SERVICE_PORT": "6443"}
        return environment | server

    def create_mesh(self, mesh: dict[str, Any]) -> None:
        """What the operator does with one of Monarch's meshes: pods with labels, each on a free machine."""
        name = mesh["metadata"]["name"]
        self.objects["MonarchMesh", name] = mesh
        taken = sum(map(len, self.pods.values()))
        spec = mesh["spec"]["podTemplate"]["spec"]
        self.pods[name] = []
        for index, node in enumerate(self.lab[1 + taken : 1 + taken + mesh["spec"]["replicas"]]):
            labels = {INDEX: str(index), MESH: name, "app.kubernetes.io/name": "monarch-worker"}
            started = self.start(spec, node, labels)
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{name}-{index}", "namespace": "lab", "labels": labels},
                "spec": {"containers": spec["containers"]},
                "status": {"podIP": node.address, "conditions": [{"type": "Ready", "status": "True"}]},
            }
            self.pods[name].append((started, pod))

    def delete_mesh(self, name: str) -> None:
        """End its pods. KeyError: there is none."""
        del self.objects["MonarchMesh", name]
        for started, _ in self.pods.pop(name):
            if started.poll() is None:
                subprocess.run(["kill", str(inside(started))], check=False)

    def selected(self, selector: str) -> list[dict[str, Any]]:
        """The pods of Monarch's meshes whose labels are those of a selector, `a=b,c=d`."""
        wanted = dict(term.split("=") for term in selector.split(","))
        pods = [pod for mesh in self.pods.values() for _, pod in mesh]
        return [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]

    def create(self, found: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: it is not what the schema asks for.
        """
        import kubernetes_validate

        try:
            kubernetes_validate.validate(found, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise ValueError(str(error)) from None
        self.objects[found["kind"], found["metadata"]["name"]] = found
        if found["kind"] == "StatefulSet":
            spec = found["spec"]
            assert ("Service", spec["serviceName"]) in self.objects
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
            for number, node in enumerate(self.lab[1 : 1 + spec["replicas"]]):
                name = f"{found['metadata']['name']}-{number}.{spec['serviceName']}"
                for machine in self.lab:  # the DNS of a headless service
                    machine.run(["sh", "-c", f"echo {node.address} {name} >>/run/hosts"], check=True)
                self.start(spec["template"]["spec"], node)
        elif found["kind"] == "Job":
            threading.Thread(target=self.run_job, args=(found["spec"],), daemon=True).start()

    def run_job(self, spec: dict[str, Any]) -> None:
        """Pods one after the other, until one succeeds or the back-off limit is reached."""
        ignored = [
            code
            for rule in spec["podFailurePolicy"]["rules"]
            if rule["action"] == "Ignore"
            for code in rule.get("onExitCodes", {}).get("values", [])
        ]
        failures = 0
        while failures <= spec["backoffLimit"]:
            code = self.start(spec["template"]["spec"], self.lab[0]).wait()
            self.codes.append(code)
            if code == 0:
                return
            failures += code not in ignored

    def start(self, pod: dict[str, Any], node: Machine, labels: dict[str, str] | None = None) -> subprocess.Popen:
        """What the kubelet does with a pod's container."""
        (container,) = pod["containers"]
        own = dict(self.image)
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                secret = self.objects["Secret", source["secretKeyRef"]["name"]]
                own[variable["name"]] = secret["stringData"][source["secretKeyRef"]["key"]]
            elif "fieldRef" in source:
                field = source["fieldRef"]["fieldPath"]
                label = re.fullmatch(r"metadata\.labels\['(.*)'\]", field)
                assert label or field == "status.podIP"
                own[variable["name"]] = (labels or {})[label[1]] if label else node.address
            else:
                own[variable["name"]] = variable["value"]
        words = expanded([*container["command"], *container.get("args", [])], own)
        log = (self.folder / f"{container['name']}-{node.name}.log").open("a")
        # A process ends with the thread that started it: not that of a request.
        folder = container.get("workingDir", "/")
        started = self.starter.submit(node.start, words, folder, env=own, stdout=log, stderr=log)
        return started.result()


def handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def is_known(self) -> bool:
            """Whether the request has the token; answers it otherwise."""
            known = (self.headers.get("Authorization") or "").lower() == f"bearer {TOKEN}"
            if not known:
                self.answer(401, {"kind": "Status", "code": 401})
            return known

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.is_known():
                return
            if body["kind"] == "MonarchMesh":
                cluster.create_mesh(body)
                self.answer(201, body)
                return
            try:
                cluster.create(body)
                self.answer(201, body)
            except ValueError as error:
                self.answer(422, {"kind": "Status", "code": 422, "message": str(error)})

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if not self.is_known():
                return
            if not path.endswith("/pods"):
                name = path.rpartition("/")[2]
                mesh = cluster.objects.get(("MonarchMesh", name))
                self.answer(200 if mesh else 404, mesh or {"kind": "Status", "code": 404})
                return
            settings = parse_qs(query)
            assert settings["watch"] == ["true"], query
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.end_headers()
            for pod in cluster.selected(settings["labelSelector"][0]):
                self.wfile.write(json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n")
            self.close_connection = True

        def do_DELETE(self) -> None:
            if self.is_known():
                cluster.delete_mesh(self.path.partition("?")[0].rpartition("/")[2])
                self.answer(200, {"kind": "Status", "status": "Success"})

        def answer(self, status: int, what: dict[str, Any]) -> None:
            text = json.dumps(what).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Handler
