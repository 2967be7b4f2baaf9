"""TextArena games for one player, or against an opponent function."""

import random
from collections.abc import Callable
from typing import Any, TypeVar

from forge_envs.environment import CUT, Action, Environment, Step, user_message

try:
    import textarena
except ImportError as error:
    raise ImportError("TextArena games need textarena: pip install textarena") from error

A = TypeVar("A")
Game = Any  # textarena.Env, whose methods are not typed
Opponent = Callable[[str], str]


class TextArenaEnvironment(Environment):
    """An observation is the messages since the player's last turn; the reward comes at the end of the game.

    Games use Python's global random generator. Each game swaps in a separate generator state during its calls, so a
    seed determines a game and concurrent games do not interfere; other threads that draw meanwhile do. Games run in
    the calling thread without a timeout: serve those that may hang (`forge_envs.openenv`).

    Args:
        game: id, such as "GuessTheNumber-v0". Some games download word lists.
        opponent: plays the other seats: maps all messages to its seat to an action.
        players: number of players.
        seat: of the policy.
        settings: of the game.

    Raises:
        ImportError: textarena is not installed.
        ValueError: unknown game, or no opponent for the other seats.
    """

    def __init__(
        self,
        game: str,
        *,
        opponent: Opponent | None = None,
        players: int = 1,
        seat: int = 0,
        **settings: Any,
    ) -> None:
        # Without its wrappers, which repeat the whole history in each turn.
        raw = game if game.endswith("-raw") else f"{game}-raw"
        if raw not in textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(f"TextArena has no game {game!r}: see textarena.pprint_registry_detailed()")
        if players > 1 and opponent is None:
            raise ValueError(f"a game for {players} players needs an opponent for the other seats")
        self._raw = raw
        self._opponent = opponent
        self._players = players
        self._seat = seat
        self._settings = settings
        self._game: Game | None = None
        self._random = random.getstate()
        self._unread: dict[int, list[str]] = {}

    async def reset(self, task: Any, *, seed: int) -> Step:
        """Start a game, determined by the seed; the task is ignored."""
        self._unread = {seat: [] for seat in range(self._players)}

        def begin_game() -> Game:
            random.seed(seed)
            game = textarena.make(self._raw, **self._settings)
            game.reset(num_players=self._players, seed=seed)
            return game

        self._game = self._with_own_random(begin_game)
        return self._until_turn(False)

    async def step(self, action: Action) -> Step:
        """Take a turn, and let the others take theirs."""
        # The game is as it was, and waits for another turn.
        if action.truncated:
            return Step((user_message(CUT),))
        return self._until_turn(self._play_action(action.answer))

    async def close(self) -> None:
        """Discard the game."""
        self._game = None

    def _until_turn(self, over: bool) -> Step:
        """Play until it is the policy's turn, or the game is over."""
        game: Game = self._game
        while not over:
            seat, messages = self._with_own_random(game.get_observation)
            # Without the seat's own messages.
            self._unread[seat] += [str(text).strip() for sender, text, _ in messages if sender != seat]
            if seat == self._seat:
                observation = "\n".join(self._unread[seat])
                self._unread[seat] = []
                return Step((user_message(observation),))
            assert self._opponent is not None
            over = self._play_action(self._opponent("\n".join(self._unread[seat])))

        # The game is over for all seats: its rewards are by seat.
        rewards, infos = self._with_own_random(game.close)
        self._game = None
        info = (infos or {}).get(self._seat, {})
        reward = (rewards or {}).get(self._seat)
        if not isinstance(reward, int | float):  # in some games the text of an invalid move
            return Step(reward=None, terminated=True, info={**info, "unscored": f"the game's reward is {reward!r}"})

        return Step(reward=float(reward), terminated=True, info=info)

    def _play_action(self, text: str) -> bool:
        """Take an action; True if it ended the game. Brackets are added to an action without them."""
        game: Game = self._game
        # The games look for actions in brackets.
        action = text if "[" in text and "]" in text else f"[{text}]"
        return bool(self._with_own_random(lambda: game.step(action))[0])

    def _with_own_random(self, function: Callable[[], A]) -> A:
        """Call a function with the game's own state of the random generator."""
        global_state = random.getstate()
        random.setstate(self._random)
        try:
            return function()
        finally:
            self._random = random.getstate()
            random.setstate(global_state)
