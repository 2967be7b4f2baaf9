"""TextArena games as environments: for one player, or against an opponent function."""

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


class TextArenaEnvironment(Environment):
    """A TextArena game in which the policy plays one player.

    An observation is the messages since the policy's last turn; the reward is given at the end of the game.

    Games use Python's global random generator. During its calls each game replaces the generator's state by its own, so
    that a seed determines a game, and concurrent games do not interfere. Other threads that draw random numbers at the
    same time do. Games run in the calling thread without a timeout: run games that may hang in a server
    (`forge_envs.openenv`).

    Args:
        game: its id, such as "GuessTheNumber-v0". Some games download word lists.
        opponent: plays the other players: gets all messages to a player so far as one text, and returns an action.
        players: the number of players.
        seat: the policy's player id, from 0.
        settings: the game's settings.

    Raises:
        ImportError: textarena is not installed.
        ValueError: the game is unknown, or the other players have no opponent function.
    """

    def __init__(
        self,
        game: str,
        *,
        opponent: Callable[[str], str] | None = None,
        players: int = 1,
        seat: int = 0,
        **settings: Any,
    ) -> None:
        # TextArena registers each game a second time as NAME-raw, without the wrappers of the first, which repeat the
        # whole history in each observation.
        raw_id = game if game.endswith("-raw") else f"{game}-raw"
        if raw_id not in textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(f"TextArena has no game {game!r}: see textarena.pprint_registry_detailed()")
        if players > 1 and opponent is None:
            raise ValueError(f"a game for {players} players needs an opponent for the other seats")
        self._raw_id = raw_id
        self._opponent = opponent
        self._players = players
        self._seat = seat
        self._settings = settings
        self._game: Game | None = None
        self._random = random.getstate()  # the state of Python's generator that belongs to the game

    async def reset(self, task: Any, *, seed: int) -> Step:
        """Start the game that the seed determines, and return the policy's first observation; the task is ignored."""
        # By player; of the policy, only those since its last turn.
        self._messages: dict[int, list[str]] = {player: [] for player in range(self._players)}

        def start_game() -> Game:
            random.seed(seed)
            game = textarena.make(self._raw_id, **self._settings)
            game.reset(num_players=self._players, seed=seed)
            return game

        self._game = self._with_own_random(start_game)
        return self._continue_game(is_over=False)

    async def step(self, action: Action) -> Step:
        """Play the policy's action, then those of its opponents, and return the policy's next observation."""
        # A truncated turn is not played: the game waits for another one.
        if action.truncated:
            return Step((user_message(CUT),))
        return self._continue_game(is_over=self._play_action(action.answer))

    async def close(self) -> None:
        """Discard the game."""
        self._game = None

    def _continue_game(self, is_over: bool) -> Step:
        """Let the opponents play until it is the policy's turn or the game is over, and return what the policy gets.

        Args:
            is_over: whether the last action has ended the game.
        """
        game: Game = self._game
        while not is_over:
            player, messages = self._with_own_random(game.get_observation)
            # Games send each player's own actions to it as well.
            self._messages[player] += [str(text).strip() for sender, text, _ in messages if sender != player]
            if player == self._seat:
                observation = "\n".join(self._messages[player])
                self._messages[player] = []
                return Step((user_message(observation),))
            assert self._opponent is not None
            is_over = self._play_action(self._opponent("\n".join(self._messages[player])))

        # `close` returns two mappings of players to their rewards and infos.
        rewards, infos = self._with_own_random(game.close)
        self._game = None
        info = (infos or {}).get(self._seat, {})
        reward = (rewards or {}).get(self._seat)
        if not isinstance(reward, int | float):  # some games give the text of an invalid move instead
            return Step(reward=None, terminated=True, info={**info, "unscored": f"the game's reward is {reward!r}"})

        return Step(reward=float(reward), terminated=True, info=info)

    def _play_action(self, text: str) -> bool:
        """Play an action of the player whose turn it is, and return whether it has ended the game."""
        game: Game = self._game
        # Games look for actions in brackets, which are added to a text without them.
        action = text if "[" in text and "]" in text else f"[{text}]"
        return bool(self._with_own_random(lambda: game.step(action))[0])  # of (is over, info)

    def _with_own_random(self, function: Callable[[], A]) -> A:
        """Call a function while Python's random generator has the game's state, and return the result."""
        global_state = random.getstate()
        random.setstate(self._random)
        try:
            return function()
        finally:
            self._random = random.getstate()
            random.setstate(global_state)
