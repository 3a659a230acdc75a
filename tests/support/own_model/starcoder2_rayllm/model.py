from torch import nn

from rayllm.layers.activation import activation
from rayllm.layers.attention import Attention, AttentionPlan
from rayllm.layers.embedding import Embedding, LMHead
from rayllm.layers.linear import ColumnLinear, RowLinear, column_part, qkv_parts
from rayllm.layers.norm import LayerNorm
from rayllm.layers.rotary import cos_sin_table
from rayllm.models.base import CausalLM, heads_of
from rayllm_kernels.ops import Scoring


class Layer(nn.Module):
    def __init__(self, build, spec, number, rotary):
        super().__init__()
        attn, mlp, heads, hidden = build.at("self_attn"), build.at("mlp"), heads_of(spec), spec.hidden_size
        inner, width = spec.intermediate_size, spec.num_heads * spec.head_dim
        self.norm = LayerNorm(build.at("input_layernorm"), hidden, spec.norm_eps)
        self.qkv = ColumnLinear(attn, hidden, qkv_parts(attn, heads), bias=spec.qkv_bias)
        scoring = Scoring(spec.head_dim**-0.5, spec.sliding_windows[number])
        self.attention = Attention(attn, heads, scoring, rotary)
        self.out = RowLinear(attn.at("o_proj"), width, hidden, bias=spec.attention_out_bias)
        self.mlp_norm = LayerNorm(build.at("post_attention_layernorm"), hidden, spec.norm_eps)
        self.up = ColumnLinear(mlp, hidden, [column_part(mlp, "c_fc", inner)], bias=spec.mlp_bias)
        self.act = activation(spec.hidden_act, build)
        self.down = RowLinear(mlp.at("c_proj"), inner, hidden, bias=spec.mlp_bias)

    def forward(self, x, kv_cache, plan):
        q = self.attention.store(self.qkv(self.norm(x)), kv_cache, plan)
        x = x + self.out(self.attention.attend(q, kv_cache, plan))
        return x + self.down(self.act(self.up(self.mlp_norm(x))))


class Starcoder2ForCausalLM(CausalLM):
    def __init__(self, build, spec):
        super().__init__(build, spec)
        body, hidden = build.at("model"), spec.hidden_size
        rotary = cos_sin_table(spec.rope, build.max_model_len).to(build.device)
        self.embed = Embedding(body.at("embed_tokens"), spec.vocab_size, hidden)
        self.layers = nn.ModuleList(Layer(body.at(f"layers.{i}"), spec, i, rotary) for i in range(spec.num_layers))
        self.norm = LayerNorm(body.at("norm"), hidden, spec.norm_eps)
        tied = self.embed if spec.tie_word_embeddings else None
        self.lm_head = LMHead(build.at("lm_head"), spec.vocab_size, hidden, tied=tied)

    def forward(self, batch, kv_caches):
        plan = AttentionPlan.of(batch, self.build)
        x = self.embed(batch.input_ids)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=False):
            x = layer(x, kv_cache, plan)
        return self.norm(x if batch.logit_rows is None else x[batch.logit_rows])
