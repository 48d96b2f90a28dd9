//! A uniform architecture as its plain family's config.

use serde_json::{Value, json};

use crate::{Architecture, Attention, Block, BlockShape, Error, Family, Mlp, Result};

/// What every layer of a uniform architecture is.
struct Layer<'architecture> {
    attention: &'architecture Attention,
    mlp: &'architecture Mlp,
}

impl Architecture {
    /// Whether every layer has an attention and an MLP block, all of equal sizes, so that the family's own
    /// config can express it. Families with one block a layer are never uniform.
    pub fn is_uniform(&self) -> bool {
        self.uniform_layer().is_ok()
    }

    /// The same blocks with layers numbered from 0 without gaps: one for each attention and MLP pair where the
    /// architecture is uniform, one for each block in families of one block a layer, otherwise one for each
    /// layer of which something is left.
    #[must_use]
    pub fn renumbered(&self) -> Self {
        let uniform = self.is_uniform();
        let mut blocks: Vec<Block> = Vec::with_capacity(self.blocks.len());
        let mut previous = None;
        let mut layers = 0_usize;
        for (index, block) in self.blocks.iter().enumerate() {
            let starts = match self.family {
                Family::NemotronH => true,
                _ if uniform => index.is_multiple_of(2),
                _ => previous != Some(block.layer),
            };
            layers += usize::from(starts);
            previous = Some(block.layer);
            blocks.push(Block {
                layer: layers.saturating_sub(1),
                shape: block.shape.clone(),
            });
        }
        Self {
            blocks,
            layers,
            ..self.clone()
        }
    }

    /// The config of this architecture as its plain family, layers renumbered from 0: `parent_config`, with the
    /// sizes of this one. Other keys, RoPE's among them, are kept, for pruning changes none.
    ///
    /// # Errors
    /// When the architecture is not uniform, or `parent_config` is not an object.
    pub fn to_config(&self, parent_config: &Value) -> Result<Value> {
        let layer = self.uniform_layer()?;
        let Some(mut config) = parent_config.as_object().cloned() else {
            return Err(Error::BadValue {
                key: "(whole file)".to_owned(),
                value: super::keys::shortened(parent_config),
                expected: "the parent's config, a JSON object of keys".to_owned(),
            });
        };
        // The plain family needs no code of its own.
        config.remove("auto_map");
        let windows = self.windows();
        let (model_type, class) = names(self.family);
        let layers = windows.len();
        let own = [
            ("model_type", json!(model_type)),
            ("architectures", json!([class])),
            ("vocab_size", json!(self.vocab_size)),
            ("hidden_size", json!(self.hidden)),
            ("num_hidden_layers", json!(layers)),
            ("num_attention_heads", json!(layer.attention.query_heads())),
            ("num_key_value_heads", json!(layer.attention.kv_groups)),
            ("head_dim", json!(layer.attention.head_dim)),
            ("intermediate_size", json!(layer.mlp.channels)),
            ("tie_word_embeddings", json!(self.tied_embedding)),
            ("rms_norm_eps", json!(self.norm_epsilon)),
            ("max_position_embeddings", json!(self.max_positions)),
        ];
        config.extend(own.map(|(key, value)| (key.to_owned(), value)));
        let slides = windows.iter().any(Option::is_some);
        if matches!(self.family, Family::Qwen2 | Family::Qwen3) && slides {
            config.insert("use_sliding_window".to_owned(), json!(true));
            config.insert(
                "sliding_window".to_owned(),
                json!(windows.iter().flatten().next()),
            );
            config.insert(
                "max_window_layers".to_owned(),
                json!(windows.iter().take_while(|window| window.is_none()).count()),
            );
        }
        if config.contains_key("layer_types") || (slides && self.family != Family::Mistral) {
            let named = |window: &Option<usize>| {
                if window.is_some() {
                    "sliding_attention"
                } else {
                    "full_attention"
                }
            };
            config.insert(
                "layer_types".to_owned(),
                json!(windows.iter().map(named).collect::<Vec<_>>()),
            );
        }
        Ok(Value::Object(config))
    }

    fn windows(&self) -> Vec<Option<usize>> {
        let window = |block: &Block| match &block.shape {
            BlockShape::Attention(attention) => Some(attention.sliding_window),
            _ => None,
        };
        self.blocks.iter().filter_map(window).collect()
    }

    /// What every layer is, or why there is no such thing.
    fn uniform_layer(&self) -> Result<Layer<'_>> {
        let not = |reason: String| Error::NotUniform { reason };
        if self.family == Family::NemotronH {
            return Err(not("its family has one block a layer".to_owned()));
        }
        let (pairs, rest) = self.blocks.as_chunks::<2>();
        let mut first: Option<Layer<'_>> = None;
        for (index, pair) in pairs.iter().enumerate() {
            let [
                Block {
                    shape: BlockShape::Attention(attention),
                    ..
                },
                Block {
                    shape: BlockShape::Mlp(mlp),
                    ..
                },
            ] = pair
            else {
                return Err(not(format!(
                    "blocks {} and {} are no such pair",
                    index * 2,
                    index * 2 + 1
                )));
            };
            let Some(first) = &first else {
                first = Some(Layer { attention, mlp });
                continue;
            };
            // The window goes by layer in the plain families too.
            let same_window = Attention {
                sliding_window: first.attention.sliding_window,
                ..attention.clone()
            };
            if same_window != *first.attention || mlp != first.mlp {
                return Err(not(format!(
                    "blocks {} and {} are of other sizes than the first",
                    index * 2,
                    index * 2 + 1
                )));
            }
        }
        if !rest.is_empty() {
            return Err(not("its last block has no partner".to_owned()));
        }
        first.ok_or_else(|| not("it has no blocks".to_owned()))
    }
}

/// `model_type` and class name of a family.
fn names(family: Family) -> (&'static str, &'static str) {
    match family {
        Family::Llama => ("llama", "LlamaForCausalLM"),
        Family::Mistral => ("mistral", "MistralForCausalLM"),
        Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
        Family::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        Family::NemotronH => ("nemotron_h", "NemotronHForCausalLM"),
    }
}
