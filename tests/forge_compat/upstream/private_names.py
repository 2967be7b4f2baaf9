"""Private names of torchforge that its test files import alongside public ones."""


class PrivateOfServices:
    """A class of torchforge's services that their callers never see."""


LeastLoadedRouter = Replica = ReplicaState = RoundRobinRouter = ServiceConfig = SessionRouter = PrivateOfServices
ProcessConfig = PrivateOfServices


class PrivateTimer:
    """A timer of torchforge's tracers."""


_TimerCPU = _TimerCUDA = PrivateTimer
