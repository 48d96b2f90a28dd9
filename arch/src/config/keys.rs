//! Reads one value at a time from a config, with errors that say what would be right.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Widths beyond this belong to no model, and products of two of them still fit in 64 bits.
pub(super) const MAX_WIDTH: usize = 1 << 20;
/// Vocabularies beyond this belong to no tokenizer.
pub(super) const MAX_VOCABULARY: usize = 1 << 24;
/// Layers beyond this belong to no model.
pub(super) const MAX_LAYERS: usize = 4096;
/// Experts of one block.
pub(super) const MAX_EXPERTS: usize = 4096;
/// Positions and windows, in tokens.
pub(super) const MAX_TOKENS: usize = 1 << 32;

/// A config, or one entry of a list that overrides it.
#[derive(Clone, Copy)]
pub(super) struct Keys<'config> {
    base: &'config Map<String, Value>,
    overrides: Option<(&'config Map<String, Value>, usize)>,
}

impl<'config> Keys<'config> {
    pub(super) fn new(base: &'config Map<String, Value>) -> Self {
        Self {
            base,
            overrides: None,
        }
    }

    /// The same config, with the keys of `block_configs[index]` first.
    pub(super) fn overridden(self, overrides: &'config Map<String, Value>, index: usize) -> Self {
        Self {
            overrides: Some((overrides, index)),
            ..self
        }
    }

    /// The value, null included.
    pub(super) fn raw(&self, key: &str) -> Option<&'config Value> {
        self.overrides
            .and_then(|(overrides, _)| overrides.get(key))
            .or_else(|| self.base.get(key))
    }

    /// The value, unless it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'config Value> {
        self.raw(key).filter(|value| !value.is_null())
    }

    /// The path to a key, for an error.
    pub(super) fn path(&self, key: &str) -> String {
        match self.overrides {
            Some((overrides, index)) if overrides.contains_key(key) => {
                format!("block_configs[{index}].{key}")
            }
            _ => key.to_owned(),
        }
    }

    pub(super) fn missing(&self, key: &str, expected: &str) -> Error {
        Error::MissingKey {
            key: self.path(key),
            expected: expected.to_owned(),
        }
    }

    pub(super) fn bad(&self, key: &str, expected: impl Into<String>) -> Error {
        let value = self.raw(key).map_or_else(|| "absent".to_owned(), shortened);
        Error::BadValue {
            key: self.path(key),
            value,
            expected: expected.into(),
        }
    }

    pub(super) fn required(&self, key: &str, expected: &str) -> Result<&'config Value> {
        self.get(key).ok_or_else(|| self.missing(key, expected))
    }

    /// A whole number from 1 to `most`.
    pub(super) fn size(&self, key: &str, most: usize) -> Result<usize> {
        let expected = format!("a whole number from 1 to {most}");
        self.required(key, &expected)?;
        self.whole(key, 1, most)
    }

    /// A whole number from 1 to `most`; none when absent or null.
    pub(super) fn optional_size(&self, key: &str, most: usize) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some(_) => self.whole(key, 1, most).map(Some),
        }
    }

    /// A whole number within bounds, of a key that is there.
    pub(super) fn whole(&self, key: &str, least: usize, most: usize) -> Result<usize> {
        self.get(key)
            .and_then(Value::as_u64)
            .and_then(|value| usize::try_from(value).ok())
            .filter(|value| (least..=most).contains(value))
            .ok_or_else(|| self.bad(key, format!("a whole number from {least} to {most}")))
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.bad(key, "true or false")),
        }
    }

    /// A finite number above zero; none when absent or null.
    pub(super) fn optional_positive(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value
                .as_f64()
                .filter(|number| number.is_finite() && *number > 0.0)
                .map(Some)
                .ok_or_else(|| self.bad(key, "a number above 0")),
        }
    }

    /// The epsilon of a norm, under whichever of these keys has it.
    pub(super) fn epsilon(&self, spellings: &[&str]) -> Result<f64> {
        let named = spellings
            .iter()
            .find(|key| self.get(key).is_some())
            .or_else(|| spellings.first());
        let key = named.copied().unwrap_or_default();
        let epsilon = self
            .optional_positive(key)?
            .ok_or_else(|| self.missing(key, "a number above 0, as 1e-5"))?;
        if epsilon >= 1.0 {
            return Err(self.bad(key, "a number above 0 and below 1, as 1e-5"));
        }
        Ok(epsilon)
    }

    /// Refuses every value but the one that is implemented; absent is that one.
    pub(super) fn only(&self, key: &str, allowed: &Value, why: &str) -> Result<()> {
        match self.get(key) {
            Some(value) if value != allowed => Err(self.bad(key, format!("{allowed} ({why})"))),
            _ => Ok(()),
        }
    }

    /// Two sizes whose product is a width.
    pub(super) fn check_width(&self, keys: [&str; 2], sizes: [usize; 2]) -> Result<()> {
        let product = sizes[0].checked_mul(sizes[1]);
        if product.is_some_and(|width| width <= MAX_WIDTH) {
            return Ok(());
        }
        Err(Error::BadValue {
            key: format!("{} × {}", self.path(keys[0]), self.path(keys[1])),
            value: format!("{} × {}", sizes[0], sizes[1]),
            expected: format!("a product of at most {MAX_WIDTH}"),
        })
    }
}

/// A value as JSON, short enough for an error line.
pub(super) fn shortened(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    if text.chars().count() <= LONGEST {
        return text;
    }
    let start: String = text.chars().take(LONGEST).collect();
    format!("{start}…")
}
