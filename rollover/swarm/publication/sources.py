"""Sources of blobs: the one that has been fast and reliable comes first, the others are not forgotten.

Pure bookkeeping; whoever downloads says what happened. A source is worth its success times its bandwidth, shared among
the downloads that are under way there. A failure halves its success at once and time heals it slowly, so that a source
that has recovered is found out about, and one that has not costs little. One that says nothing at all costs much each
time, so it is left alone for five minutes, except for what no other has.

The last source listed is the home of the blobs, which all workers share, so it is asked only where it is worth four
times as much as any other, or where they are slow and it may be so much faster. What it would give is known from short
tries, since the relays before it may be bad.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

_HEAL_S = 300.0
"""Seconds in which a source regains 63 % of the success that failures cost it."""
_REST_S = 300.0
"""Seconds for which a source that has said nothing is left alone."""
_NEW_SHARE = 0.3
"""Weight of the newest measurement of a bandwidth."""
_SPARED = 4
"""Factor by which the last source must be worth more than another."""
_RESTING = 1e9
"""Factor by which a source that is left alone is worth less than otherwise: less than any other."""
_MEASURED_FROM_BYTES, _MEASURED_FROM_S = 2**18, 1.0
"""A download that is smaller and quicker shows how far a source is away, and not its bandwidth."""
_ASSUMED_BYTES_PER_S = 1e6
"""Assumed minimum rate of a source before it has been measured."""
_OLD_S = 600.0
"""Seconds after which the bandwidth of a source is measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEstimate:
    """The measurements of one source.

    Example: ``SourceEstimate(success=0.5, bytes_per_s=2e7, num_active=1)`` of a source that has just failed once, and
    else gives 20 MB/s.
    """

    success: float = 1.0
    """Between 0 and 1: how likely it is to answer as it should, as of ``updated_s``."""
    bytes_per_s: float | None = None
    """Rate of all downloads together; ``None`` before the first measurement."""
    num_active: int = 0
    updated_s: float = 0.0
    rests_until_s: float = -math.inf
    """Time before which it is asked only for what no other source has."""
    tried_s: float = -math.inf
    """Time at which a download last measured it or failed."""


class BlobSources:
    """The sources, by base URL, best guess first.

    Example: ``BlobSources(["http://relay/blobs", "http://trainer/blobs"]).best()`` is the relay, until it disappoints.
    """

    def __init__(self, urls: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, SourceEstimate] = {}
        self._urls: tuple[str, ...] = ()
        self.use(urls)

    def use(self, urls: Sequence[str]) -> None:
        """Take these from now on; what is known of them stays known."""
        self._urls = tuple(dict.fromkeys(url if "?" in url else url.rstrip("/") for url in urls))
        for url in self._urls:
            self._known.setdefault(url, SourceEstimate(updated_s=self._clock()))

    @property
    def urls(self) -> tuple[str, ...]:
        return self._urls

    @property
    def home(self) -> str | None:
        """Return the last source."""
        return self._urls[-1] if self._urls else None

    def estimate(self, url: str) -> SourceEstimate:
        """Return what is known of a source now, with what time has healed."""
        known, now_s = self._known[url], self._clock()
        failed = (1 - known.success) * math.exp(-max(0.0, now_s - known.updated_s) / _HEAL_S)
        return replace(known, success=1 - failed, updated_s=now_s)

    def best(self, avoid: Collection[str] = ()) -> str | None:
        """Return the source to ask next, or ``None`` when all are to be avoided."""
        candidates = [url for url in self._urls if url not in avoid]
        return max(candidates, key=self._worth, default=None)

    def untried(self, avoid: Collection[str] = ()) -> str | None:
        """Return a source that would not be asked now, although its speed is not, or no longer, known."""
        best = self.best(avoid)
        for url in self._urls:
            if url != best and url not in avoid and not self._known[url].num_active and self._is_unknown(url):
                return url
        return None

    def bandwidth_elsewhere(self, url: str, avoid: Collection[str] = ()) -> float:
        """Return the bytes per second that are worth leaving ``url`` for; 0 when there is no other source. One that
        has neither been measured nor failed lately is assumed to be as fast as the fastest."""
        others = [other for other in self._urls if other != url and other not in avoid]
        return max((self._worth(o) for o in others if self._known[o].bytes_per_s or self._is_unknown(o)), default=0.0)

    def started(self, url: str) -> None:
        """Note that a download from the source has begun; ``ended`` follows."""
        known = self.estimate(url)
        self._known[url] = replace(known, num_active=known.num_active + 1)

    def ended(self, url: str, num_bytes: int, elapsed_s: float, *, well: bool, is_silent: bool = False) -> None:
        """Note what a download has shown of the source; ``is_silent``: it was waited for in vain."""
        known = self.estimate(url)
        bandwidth = known.bytes_per_s
        is_measure = num_bytes >= _MEASURED_FROM_BYTES or (num_bytes > 0 and elapsed_s >= _MEASURED_FROM_S)
        if is_measure:
            measured = known.num_active * num_bytes / max(elapsed_s, 1e-6)
            bandwidth = measured if bandwidth is None else (1 - _NEW_SHARE) * bandwidth + _NEW_SHARE * measured
        self._known[url] = replace(
            known,
            success=known.success if well else known.success / 2,
            bytes_per_s=bandwidth,
            tried_s=known.tried_s if well and not is_measure else known.updated_s,
            rests_until_s=known.updated_s + _REST_S if is_silent and url != self.home else known.rests_until_s,
            num_active=known.num_active - 1,
        )

    def _is_unknown(self, url: str) -> bool:
        """Say whether no download has measured the source, or failed there, lately."""
        return self._clock() - self._known[url].tried_s > _OLD_S

    def _worth(self, url: str) -> float:
        """Return the bytes per second to be expected of one more download; the last source's count for a quarter."""
        known = self.estimate(url)
        fastest = max((other.bytes_per_s or 0.0 for other in self._known.values()), default=0.0)
        bandwidth = max(fastest, _ASSUMED_BYTES_PER_S) if known.bytes_per_s is None else known.bytes_per_s
        spared = _SPARED if len(self._urls) > 1 and url == self.home else 1
        resting = _RESTING if known.updated_s < known.rests_until_s else 1
        return known.success * bandwidth / (1 + known.num_active) / spared / resting
