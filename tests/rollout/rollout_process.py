"""A rollout in a process of its own, to be killed: it says which episodes it begins to play, and which have ended.

    python rollout_process.py URL FOLDER SCENARIOS

It resumes what the folder holds, and needs the benchmarks' folder on its path, for the task.
"""

import sys

from rollout.ledger_env import LedgerEnv, scenarios

from art_gym.rollout import Runner
from art_gym.store import EpisodeStore
from art_gym_agents import ChatAgent

LABEL = "train"


class TellingAgent(ChatAgent):
    async def act(self, state):
        if state.turn == 0:
            print(f"plays {LABEL}/{state.scenario.options['ledger']}/{state.member}", flush=True)
        return await super().act(state)


class TellingProgress:
    def on_episode(self, episode):
        print(f"ended {episode.id}", flush=True)


def main(url: str, folder: str, count: int) -> None:
    runner = Runner(LedgerEnv, TellingAgent(url, "mock"), concurrency=6, group_size=2)
    with EpisodeStore(folder) as store:
        runner.collect(scenarios(count), journal=store.journal(LABEL), resume=True, progress=TellingProgress())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
