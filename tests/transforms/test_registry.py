"""Registration of rules, and which primitives count as JAX's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from unitscale import as_scaled, to_array
from unitscale.transforms import register, scalify, unlisted
from unitscale.transforms._registry import rule_of


@pytest.mark.parametrize("target", [lax.add_p, "add", "dot_general", "scan"])
def test_a_primitive_has_one_rule(target: Any) -> None:
    with pytest.raises(ValueError, match=r"has a rule already, in category"):
        register("mine", target)


def test_look_up_by_object_and_by_name() -> None:
    rule = rule_of(lax.add_p)
    assert rule is not None
    assert (rule.name, rule.category) == ("add", "wide")
    assert rule_of(Primitive("a name that nobody has")) is None


def test_other_libraries_are_not_asked_for_but_jax_is(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign, own = Primitive("foreign"), Primitive("own")
    rule = functools.partial(lax.add, (lambda *_: None,))
    monkeypatch.setitem(ad.primitive_jvps, foreign, rule)
    assert unlisted() == []
    monkeypatch.setitem(ad.primitive_jvps, own, lax.add)
    assert unlisted() == ["own"]


def test_a_primitive_without_a_rule_takes_the_default() -> None:
    primitive = Primitive("tripled")
    primitive.def_impl(lambda x: x * 3)
    primitive.def_abstract_eval(lambda x: x)
    x = as_scaled(jnp.full(4, 1e-6), dtype=jnp.float16)
    scaled = scalify(lambda a: primitive.bind(a))
    assert float(jnp.max(jnp.abs(to_array(scaled(x)) / x.value - 3))) < 1e-3
    assert [d.primitive for d in _report(primitive, x)] == ["tripled"]


def _report(primitive: Primitive, x: Any) -> Any:
    mlir.register_lowering(primitive, mlir.lower_fun(lambda v: v * 3, multiple_results=False))
    assert isinstance(x.data, jax.Array)
    return scalify(lambda a: primitive.bind(a)).report(x)
