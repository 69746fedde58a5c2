"""Makes tensors of what requests give in another form: texts, images and recordings."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="prepare",
    extras={"embeddings": ("tokenizers",), "media": ("PIL", "soundfile", "soxr")},
    preparer=("millstream.plugins.prepare.gateway.tokenizers:build", "millstream.plugins.prepare.gateway.media:build"),
    upload_checks=("millstream.plugins.prepare.tokenizer_client:try_tokenizers",),
)
