"""The model that an engine serves, as the HTTP side sees it."""

from __future__ import annotations

from tests.support.scripted_engine import Script, engine

from sfumato.engine import ServedModel


def test_a_served_model_has_no_network() -> None:
    serving, _ = engine(Script(40, 5))
    served, model = serving.served, serving.model
    assert (served.name, served.packaged, served.device) == ("scripted", None, "cpu")
    assert served.tokenizer is model.tokenizer and served.template is model.template
    assert served.end_ids == model.end_ids and served.config is model.config
    assert not any(value is model.network for value in vars(served).values())
    assert served != ServedModel.of(model) and hash(served)  # each is itself alone
