//! How a served model's numbers are stored, component by component, and what its weights come to in bytes.
//!
//! Only the matrices of a block are ever quantised, with their scales beside them. Norms, biases, convolutions,
//! Mamba's vectors and routers stay plain, and so do embedding and head unless they are asked for by name: that is
//! how quantised checkpoints are made.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Precision, sum};
use crate::{Architecture, BlockShape, Role};

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
    /// Eight bits a number; a scale of the weights and one of the inputs, f32, for each matrix.
    Fp8,
    /// Four bits a number, an eight-bit scale for every sixteen along a row, and two f32 scales for each matrix.
    Nvfp4,
}

/// Numbers of a row that share one scale in NVFP4.
const NVFP4_GROUP: u64 = 16;
/// A scale of the weights and one of the inputs.
const MATRIX_SCALES_BYTES: u64 = 8;

impl WeightFormat {
    const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::Fp8, Self::Nvfp4];
    const NAMES: &str = "f32, bf16, fp8, nvfp4";

    /// The name that people write.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// Bytes of one matrix, its scales included.
    pub fn matrix_bytes(self, rows: u64, columns: u64) -> u64 {
        let elements = rows.saturating_mul(columns);
        match self {
            Self::F32 => elements.saturating_mul(4),
            Self::Bf16 => elements.saturating_mul(2),
            Self::Fp8 => elements.saturating_add(MATRIX_SCALES_BYTES),
            Self::Nvfp4 => {
                let packed = rows.saturating_mul(columns.div_ceil(2));
                let scales = rows.saturating_mul(columns.div_ceil(NVFP4_GROUP));
                packed.saturating_add(scales).saturating_add(MATRIX_SCALES_BYTES)
            }
        }
    }

    /// How what is never quantised is stored beside it.
    fn beside(self) -> Self {
        if self == Self::F32 { Self::F32 } else { Self::Bf16 }
    }
}

impl FromStr for WeightFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|format| format.name() == text);
        known.ok_or_else(|| format!("`{text}` is no precision, expected one of {}", Self::NAMES))
    }
}

/// Parts of a model that may be stored each in its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    /// Embedding and head.
    Tables,
    /// Matrices of attention.
    Attention,
    /// Input and output projections of Mamba-2.
    Mamba,
    /// Matrices of MLPs.
    Mlp,
    /// Matrices of routed experts.
    Experts,
    /// Matrices of shared experts, and those into and out of the latent width.
    Shared,
    /// Norms, biases, convolutions, Mamba's vectors, routers: never quantised.
    Plain,
}

impl Component {
    /// Every component, in order.
    pub const ALL: [Self; 7] = [
        Self::Tables,
        Self::Attention,
        Self::Mamba,
        Self::Mlp,
        Self::Experts,
        Self::Shared,
        Self::Plain,
    ];

    /// The name that people write.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tables => "tables",
            Self::Attention => "attention",
            Self::Mamba => "mamba",
            Self::Mlp => "mlp",
            Self::Experts => "experts",
            Self::Shared => "shared",
            Self::Plain => "plain",
        }
    }

    fn of(role: Role) -> Self {
        match role {
            Role::Embedding | Role::Head => Self::Tables,
            Role::Query | Role::Key | Role::Value | Role::Output => Self::Attention,
            Role::Gate | Role::Up | Role::Down => Self::Mlp,
            Role::MambaIn | Role::MambaOut => Self::Mamba,
            Role::ExpertGate(_) | Role::ExpertUp(_) | Role::ExpertDown(_) => Self::Experts,
            Role::SharedGate | Role::SharedUp | Role::SharedDown | Role::LatentIn | Role::LatentOut => {
                Self::Shared
            }
            _ => Self::Plain,
        }
    }
}

/// How each part of a served model is stored. Written `nvfp4`, or with exceptions `nvfp4,attention=bf16,mamba=fp8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Embedding and head.
    pub tables: WeightFormat,
    /// Matrices of attention.
    pub attention: WeightFormat,
    /// Projections of Mamba-2.
    pub mamba: WeightFormat,
    /// Matrices of MLPs.
    pub mlp: WeightFormat,
    /// Matrices of routed experts.
    pub experts: WeightFormat,
    /// Matrices of shared experts and of the latent width.
    pub shared: WeightFormat,
    /// What is never quantised.
    pub plain: Precision,
    /// Keys, values and the inputs that convolutions keep. Mamba's recurrent state is f32 whatever this is.
    pub kv: Precision,
}

impl Storage {
    /// Every matrix of a block in `format`; the rest in f32 beside f32, in bf16 beside anything else.
    pub fn all(format: WeightFormat) -> Self {
        let plain = match format.beside() {
            WeightFormat::F32 => Precision::F32,
            _ => Precision::Bf16,
        };
        Self {
            tables: format.beside(),
            attention: format,
            mamba: format,
            mlp: format,
            experts: format,
            shared: format,
            plain,
            kv: plain,
        }
    }

    fn format(&self, component: Component) -> Option<WeightFormat> {
        match component {
            Component::Tables => Some(self.tables),
            Component::Attention => Some(self.attention),
            Component::Mamba => Some(self.mamba),
            Component::Mlp => Some(self.mlp),
            Component::Experts => Some(self.experts),
            Component::Shared => Some(self.shared),
            Component::Plain => None,
        }
    }

    fn format_mut(&mut self, name: &str) -> Option<&mut WeightFormat> {
        match name {
            "tables" => Some(&mut self.tables),
            "attention" => Some(&mut self.attention),
            "mamba" => Some(&mut self.mamba),
            "mlp" => Some(&mut self.mlp),
            "experts" => Some(&mut self.experts),
            "shared" => Some(&mut self.shared),
            _ => None,
        }
    }

    fn bytes(&self, role: Role, shape: &[usize]) -> u64 {
        let rows = shape.first().map_or(1, |rows| *rows as u64);
        let columns = shape
            .iter()
            .skip(1)
            .fold(1_u64, |product, axis| product.saturating_mul(*axis as u64));
        match self.format(Component::of(role)) {
            Some(format) => format.matrix_bytes(rows, columns),
            None => rows.saturating_mul(columns).saturating_mul(self.plain.bytes()),
        }
    }
}

impl FromStr for Storage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, exceptions) = text
            .split_once(',')
            .map_or((text, ""), |(first, rest)| (first, rest));
        let mut storage = Self::all(first.trim().parse()?);
        for exception in exceptions.split(',').filter(|part| !part.trim().is_empty()) {
            let wrong = || {
                format!(
                    "`{}` is no exception, expected tables, attention, mamba, mlp, experts or shared, `=` and one of {}",
                    exception.trim(),
                    WeightFormat::NAMES
                )
            };
            let (name, format) = exception.split_once('=').ok_or_else(wrong)?;
            *storage.format_mut(name.trim()).ok_or_else(wrong)? = format.trim().parse()?;
        }
        Ok(storage)
    }
}

impl fmt::Display for Storage {
    /// What each component is stored in, in words.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Component::ALL.into_iter();
        let named = named.filter_map(|component| Some((component.name(), self.format(component)?.name())));
        for (name, format) in named {
            write!(formatter, "{name} {format}, ")?;
        }
        write!(
            formatter,
            "the rest {}, keys and values {}",
            self.plain.name(),
            self.kv.name()
        )
    }
}

/// What one component of a model holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComponentWeights {
    /// Which.
    pub component: Component,
    /// Its parameters.
    pub parameters: u64,
    /// Their bytes, scales included.
    pub bytes: u64,
}

impl Architecture {
    /// Weights by component, those that the model has.
    pub fn stored(&self, storage: &Storage) -> Vec<ComponentWeights> {
        let mut found = Component::ALL.map(|component| ComponentWeights {
            component,
            parameters: 0,
            bytes: 0,
        });
        for tensor in self.tensors() {
            let component = Component::of(tensor.role);
            if let Some(place) = found.iter_mut().find(|place| place.component == component) {
                place.parameters = place.parameters.saturating_add(tensor.elements());
                place.bytes = place
                    .bytes
                    .saturating_add(storage.bytes(tensor.role, &tensor.shape));
            }
        }
        found.into_iter().filter(|place| place.parameters > 0).collect()
    }

    /// Bytes of embedding, head and final norm.
    pub fn stored_outside_blocks(&self, storage: &Storage) -> u64 {
        let table = [self.vocab_size, self.hidden];
        let tables = if self.tied_embedding { 1 } else { 2 };
        storage
            .bytes(Role::Embedding, &table)
            .saturating_mul(tables)
            .saturating_add(storage.bytes(Role::FinalNorm, &[self.hidden]))
    }
}

impl BlockShape {
    /// Bytes of the block's weights, its norm included, for a residual stream of width `hidden`.
    pub fn stored(&self, hidden: usize, storage: &Storage) -> u64 {
        sum(self
            .parts(hidden)
            .iter()
            .map(|part| storage.bytes(part.role, &part.shape)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn scales_are_counted_with_their_matrix() {
        assert_eq!(WeightFormat::Bf16.matrix_bytes(3, 40), 240);
        assert_eq!(WeightFormat::Fp8.matrix_bytes(3, 40), 128);
        // 20 bytes a row, three scales for 40 numbers, two scales in all.
        assert_eq!(WeightFormat::Nvfp4.matrix_bytes(3, 40), 3 * 23 + 8);
    }

    #[test]
    fn a_precision_names_its_exceptions_and_leaves_tables_plain() {
        let storage: Storage = "nvfp4, attention=bf16,mamba=fp8".parse().unwrap();
        assert_eq!(storage.mlp, WeightFormat::Nvfp4);
        assert_eq!(storage.mamba, WeightFormat::Fp8);
        assert_eq!(storage.attention, WeightFormat::Bf16);
        assert_eq!(
            (storage.tables, storage.kv),
            (WeightFormat::Bf16, Precision::Bf16)
        );
        assert_eq!("f32".parse::<Storage>().unwrap().kv, Precision::F32);
        for (text, expected) in [
            ("int4", "expected one of f32"),
            ("bf16,norms=fp8", "`norms=fp8` is no exception"),
            ("bf16,mlp", "`mlp` is no exception"),
        ] {
            let message = text.parse::<Storage>().unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
