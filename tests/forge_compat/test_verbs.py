"""Services by the verbs of Meta's torchforge, on real processes."""

import asyncio

import pytest

from forge.runtime.controller import ForgeActor, ServiceStopped, endpoint, shutdown
from tests.runtime.controller.components import Counter


class Asker(ForgeActor):
    """Has a service of another process, and endpoints with names of torchforge's."""

    def __init__(self, service) -> None:
        self.service = service

    @endpoint
    async def session_of(self) -> list[str]:
        session = await self.service.start_session()
        names = [(await self.service.where.route(sess_id=session))[0] for _ in range(4)]
        await self.service.terminate_session(session)
        return names

    @endpoint
    async def metrics(self) -> str:
        try:
            await self.service.get_metrics()
        except TypeError as error:
            return str(error)
        return "no error"

    @endpoint
    async def choose(self) -> str:
        return "its own"


@pytest.mark.processes
async def test_torchforge_session_metric_and_call_methods_work():
    service = await Counter.options(num_replicas=2).as_service(start=10)
    session = await service.start_session()
    assert session != await service.start_session()
    # In turn without a session, all at one replica with it.
    first = (await service.where.route(sess_id=session))[0]
    places = await asyncio.gather(*(service.where.route(sess_id=session) for _ in range(6)))
    assert {name for name, _pid in places} == {first}
    spread = await asyncio.gather(*(service.where.route() for _ in range(6)))
    assert len({name for name, _pid in spread}) == 2
    await service.terminate_session(session)

    assert await service.call_all("add", 1) == [11, 11]
    assert await service.add.choose(2) == 13
    async with service.session() as opened:
        with pytest.raises(TypeError):
            await service.add.route("text")
        assert opened.session_id == opened
        metrics = await service.get_metrics()
    assert (metrics.total_sessions, metrics.healthy_replicas, metrics.total_replicas) == (1, 2, 2)
    assert metrics.get_total_request_rate() == pytest.approx(16 / 60)
    summary = await service.get_metrics_summary()
    assert (summary["service"]["total_sessions"], summary["service"]["sessions_per_replica"]) == (0, 0.0)
    rows = summary["replicas"].values()
    assert sum(row["successful_requests"] for row in rows) == 1 + 6 + 6 + 2 + 1
    assert [sum(row[name] for row in rows) for name in ("failed_requests", "total_requests")] == [1, 17]
    asker = await Asker.as_actor(service)
    assert len(set(await asker.session_of.route())) == 1
    assert "counter.get_metrics is for the controller" in await asker.metrics.route()
    assert await asker.choose.route() == "its own"

    await Counter.shutdown(service)
    with pytest.raises(ServiceStopped):
        await service.add.route(1)


async def test_user_endpoint_overrides_torchforge_method_of_same_name():
    local = await Asker.as_local(None)
    try:
        assert await local.choose.route() == "its own"
        with pytest.raises(TypeError, match="for the controller"):
            await local.get_metrics()
        with pytest.raises(AttributeError, match="no endpoint 'call_som'"):
            local.call_som  # noqa: B018
    finally:
        await shutdown()


def test_unsupported_torchforge_service_argument_raises_with_hint():
    with pytest.raises(TypeError, match="unexpected keyword argument 'engine_args': tor"):
        Counter.as_service(engine_args={})


@pytest.mark.processes  # the first of a test process makes the folder of runs
async def test_torchforge_provisioner_is_local_and_other_launchers_raise():
    from forge.controller.provisioner import init_provisioner

    from forge.types import LauncherConfig, ProvisionerConfig

    local = ProvisionerConfig(launcher_config=LauncherConfig(job_name="grpo", services={"policy": {"procs": 1}}))
    provisioner = await init_provisioner(local)
    assert hasattr(provisioner.get_host_mesh("trainer"), "spawn_procs")
    with pytest.raises(
        ValueError, match=r"launcher = slurm is not supported in a script: run `forge launch slurm CONFIG`, or p"
    ):
        await init_provisioner(ProvisionerConfig(launcher_config=LauncherConfig(launcher="slurm")))
