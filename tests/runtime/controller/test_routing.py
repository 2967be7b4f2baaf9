"""Which replica serves which call: routers, sessions, queues, and what holds whatever comes and goes."""

import asyncio
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from forge.runtime.controller.balance import LoadBalancer
from forge.runtime.controller.routers import PrefixAffine, least_loaded, resolve_router
from forge.runtime.controller.types import Request

numbers = itertools.count()


@dataclass(eq=False)
class Place:
    """What the balancer knows of a replica."""

    index: int
    served: int = 0
    alive: bool = True
    requests: set = field(default_factory=set)

    @property
    def in_flight(self) -> int:
        return len(self.requests)

    def enter(self, request):
        request.send()
        self.requests.add(request)

    def leave(self, request):
        self.requests.discard(request)


def request(*args, session=None, limit=60.0):
    return Request(f"r{next(numbers)}", "work", args, {}, "a test", limit, session)


def loads(*in_flight):
    return [Place(i, requests=set(range(n))) for i, n in enumerate(in_flight)]


async def test_retried_request_avoids_replicas_killed_by_request():
    balancer = LoadBalancer(least_loaded, 4)
    places = loads(0, 2)
    for place in places:
        balancer.join(place)
    again = request()
    again.avoid = {0}
    assert (await balancer.acquire(again)).index == 1
    assert (await balancer.acquire(request())).index == 0
    balancer.leave(places[1])
    last = request()
    last.avoid = {0}
    assert (await balancer.acquire(last)).index == 0


@given(st.lists(st.text(min_size=1), min_size=20, max_size=40, unique=True), st.integers(2, 8))
def test_prefix_router_moves_only_prefixes_of_lost_replica(prompts, replicas):
    router = PrefixAffine(length=1000)
    places = loads(*[0] * replicas)
    before = {prompt: router(places, request(prompt)).index for prompt in prompts}
    assert all(router(places, request(prompt)).index == before[prompt] for prompt in prompts)
    after = {prompt: router(places[1:], request(prompt)).index for prompt in prompts}
    assert all(after[prompt] == before[prompt] for prompt in prompts if before[prompt] != 0)


def test_prefix_router_prefers_idle_replica_under_load():
    router = PrefixAffine(length=4, slack=2)
    places = loads(0, 0)
    home = router(places, request("same beginning"))
    assert router(places, request("same ending")) is home
    home.requests = set(range(3))
    assert router(places, request("same middle")) is not home


async def test_custom_service_router_is_used_and_validated():
    balancer = LoadBalancer(lambda candidates, request: candidates[request.args[0]], 10)
    for place in loads(0, 0, 0):
        balancer.join(place)
    assert [(await balancer.acquire(request(i))).index for i in (2, 0, 1)] == [2, 0, 1]
    with pytest.raises(IndexError):
        await balancer.acquire(request(3))
    balancer.router = lambda candidates, request: "the first"
    with pytest.raises(TypeError, match="one of the given candidates"):
        await balancer.acquire(request())


async def test_service_requests_beyond_max_in_flight_queue_in_order():
    balancer = LoadBalancer(least_loaded, 2)
    place = Place(0)
    balancer.join(place)
    running = [request() for _ in range(2)]
    for r in running:
        await balancer.acquire(r)
    order = []

    async def wait(number):
        await balancer.acquire(request())
        order.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert len(balancer.queued) == 3
    for r in running:
        balancer.release(place, r)
        await asyncio.sleep(0)
        assert place.in_flight == 2
    await asyncio.sleep(0)
    assert order == [0, 1]
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(balancer.queued) == 0


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["least_loaded", "round_robin"]))
def test_requests_complete_once_while_replicas_start_and_stop(seed, replicas, max_in_flight, router):
    """Replicas join and die at random while calls of several sessions run; a call whose replica died is sent again."""
    rng = random.Random(seed)

    async def main():
        balancer = LoadBalancer(resolve_router(router), max_in_flight)
        places = {i: Place(i) for i in range(replicas)}
        for place in places.values():
            balancer.join(place)
        answers, homes = [], {}

        async def call(number, session):
            r = request(number, session=session)
            while True:
                place = await balancer.acquire(r)
                assert place.in_flight <= max_in_flight
                if session is not None and place.alive:
                    home = homes.setdefault(session, place)
                    assert home is place or not home.alive
                    homes[session] = place
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                balancer.release(place, r)
                if place.alive:
                    answers.append(number)
                    return
                r.avoid.add(place.index)

        async def chaos():
            for _ in range(40):
                await asyncio.sleep(0)
                index = rng.randrange(replicas)
                if rng.random() < 0.5:
                    places[index].alive = False
                    balancer.leave(places[index])
                elif not places[index].alive:
                    places[index] = Place(index)
                    balancer.join(places[index])
            for index, place in places.items():
                if not place.alive:
                    balancer.join(Place(index))

        calls = [call(n, rng.choice([None, "a", "b", "c"])) for n in range(60)]
        await asyncio.wait_for(asyncio.gather(chaos(), *calls), 20)
        assert sorted(answers) == list(range(60))
        assert len(balancer.queued) == 0
        assert all(not place.requests for place in balancer.up)

    asyncio.run(main())
