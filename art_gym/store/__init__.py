"""The store: finished episodes on disk, by label.

A label's episodes are journaled as they end, in `episodes/<label>.jsonl` of a run: one line of JSON an episode, on disk before `append`
returns, and readable after a kill at any moment. A journal that is finished is compacted into `episodes/<label>.parquet`, from where pandas,
DuckDB and `datasets` read it too; whoever reads through this package doesn't notice. What an episode is belongs to `art_gym.episodes`; which
label an episode goes under is the caller's choice.
"""

from art_gym.store._columns import Head, Stored
from art_gym.store._index import EpisodeIndex
from art_gym.store._journal import Busy, Journal
from art_gym.store._lines import encode, encode_or_failed
from art_gym.store._parquet import write_parquet
from art_gym.store._store import EpisodeStore

__all__ = ["Busy", "EpisodeIndex", "EpisodeStore", "Head", "Journal", "Stored", "encode", "encode_or_failed", "write_parquet"]
