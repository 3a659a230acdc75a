from rayllm.config.architectures import Architecture
from rayllm.config.architectures.common import PLAIN_ACTIVATIONS, decoder_fields


def parse(config, _architecture):
    fields = decoder_fields(config, kv_heads=2)
    window = None if config.get("sliding_window") is None else config.size("sliding_window")
    return fields | {
        "intermediate_size": config.size("intermediate_size"),
        "norm_eps": config.number("norm_epsilon", 1e-5),
        "hidden_act": config.one_of("hidden_act", config.text("hidden_act", "gelu_pytorch_tanh"), PLAIN_ACTIVATIONS),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "bias": config.flag("use_bias", True),
        "sliding_windows": (window,) * fields["num_layers"],
    }


STARCODER2 = Architecture(parse, "starcoder2", 50256, model="starcoder2_rayllm.model:Starcoder2ForCausalLM")
