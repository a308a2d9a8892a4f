"""A sealed sample key shows that its member was given the sample, to every coordinator of the run and to nobody else."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.coordinator.machine.calls.sample_keys import SampleKeys
from rollover.swarm.publication.keys import open_key, secret_of

names = st.from_regex(r"[a-z0-9-]{1,8}", fullmatch=True)


@given(member=names, other=names, sample_key=st.text(), another=st.text(), secret=st.binary(min_size=1))
def test_a_key_opens_to_its_member_alone(member: str, other: str, sample_key: str, another: str, secret: bytes) -> None:
    keys, elsewhere = SampleKeys(secret), SampleKeys(secret + b"!")
    sealed = keys.sealed(member, sample_key)
    assert SampleKeys(secret).opened(member, sealed) == sample_key
    assert keys.opened(other, sealed) == (sample_key if other == member else None)
    assert elsewhere.opened(member, sealed) is None
    seal = sealed.removeprefix(sample_key)
    assert keys.opened(member, another + seal) == (another if another == sample_key else None)
    for forged in (sample_key, sample_key + "~", sealed + "~", sealed[:-1], sealed.upper() + "="):
        assert keys.opened(member, forged) is None


def test_the_secret_is_that_of_the_publishers_key_and_survives_a_restart(tmp_path: Path) -> None:
    first = secret_of(open_key(tmp_path / "publisher.key"), "samples")
    assert secret_of(open_key(tmp_path / "publisher.key"), "samples") == first
    assert secret_of(open_key(tmp_path / "publisher.key"), "others") != first
    assert secret_of(open_key(tmp_path / "another.key"), "samples") != first
    assert len(first) == 32 and first not in (tmp_path / "publisher.key").read_bytes()
