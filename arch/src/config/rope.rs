//! Rotary positions in a config: the old `rope_theta` with `rope_scaling`, and the newer `rope_parameters`.

use serde_json::{Map, Value};

use super::keys::{Keys, MAX_TOKENS, shortened};
use crate::{Error, Result, Rope, RopeScaling};

const DEFAULT_THETA: f64 = 10_000.0;
const KNOWN: &str = "one of default, linear, dynamic, llama3, yarn";

/// The entry that stretches positions, under either of its names, and what to call it in an error.
struct Entry<'config> {
    name: &'static str,
    fields: Option<&'config Map<String, Value>>,
    top: &'config Keys<'config>,
}

pub(super) fn read(keys: &Keys<'_>, max_positions: usize) -> Result<Rope> {
    let name = if keys.get("rope_parameters").is_some() {
        "rope_parameters"
    } else {
        "rope_scaling"
    };
    let fields = match keys.get(name) {
        None => None,
        Some(value) => Some(
            value
                .as_object()
                .ok_or_else(|| keys.bad(name, "an object of keys, or null"))?,
        ),
    };
    let entry = Entry {
        name,
        fields,
        top: keys,
    };
    let theta = match entry.number("rope_theta")? {
        Some(theta) => theta,
        None => keys.optional_positive("rope_theta")?.unwrap_or(DEFAULT_THETA),
    };
    if theta <= 1.0 {
        return Err(keys.bad("rope_theta", "a number above 1, as 10000"));
    }
    for partial in [
        entry.number("partial_rotary_factor")?,
        keys.optional_positive("partial_rotary_factor")?,
    ] {
        if partial.is_some_and(|share| share != 1.0) {
            return Err(keys.bad(
                "partial_rotary_factor",
                "1 (rotation of a part of each head is not implemented)",
            ));
        }
    }
    Ok(Rope {
        theta,
        scaling: entry.scaling(max_positions)?,
    })
}

impl Entry<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.fields
            .and_then(|fields| fields.get(key))
            .filter(|value| !value.is_null())
    }

    fn bad(&self, key: &str, value: &Value, expected: &str) -> Error {
        Error::BadValue {
            key: format!("{}.{key}", self.name),
            value: shortened(value),
            expected: expected.to_owned(),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = value
            .as_f64()
            .filter(|number| number.is_finite() && *number > 0.0);
        number
            .map(Some)
            .ok_or_else(|| self.bad(key, value, "a number above 0"))
    }

    fn needed(&self, key: &str) -> Result<f64> {
        let missing = || Error::MissingKey {
            key: format!("{}.{key}", self.name),
            expected: "a number above 0".to_owned(),
        };
        self.number(key)?.ok_or_else(missing)
    }

    /// How much positions are stretched; transformers takes nothing below 1.
    fn factor(&self) -> Result<f64> {
        let factor = self.needed("factor")?;
        if factor >= 1.0 {
            return Ok(factor);
        }
        Err(self.bad(
            "factor",
            self.get("factor").unwrap_or(&Value::Null),
            "a number of at least 1",
        ))
    }

    fn original(&self, max_positions: usize) -> Result<usize> {
        const KEY: &str = "original_max_position_embeddings";
        let Some(value) = self.get(KEY) else {
            return Ok(self.top.optional_size(KEY, MAX_TOKENS)?.unwrap_or(max_positions));
        };
        let original = value.as_u64().and_then(|value| usize::try_from(value).ok());
        original
            .filter(|original| (1..=MAX_TOKENS).contains(original))
            .ok_or_else(|| self.bad(KEY, value, &format!("a whole number from 1 to {MAX_TOKENS}")))
    }

    fn scaling(&self, max_positions: usize) -> Result<RopeScaling> {
        let key = if self.get("rope_type").is_some() {
            "rope_type"
        } else {
            "type"
        };
        let Some(kind) = self.get(key) else {
            // A bare `factor` would otherwise be dropped in silence.
            return match self.get("factor") {
                None => Ok(RopeScaling::None),
                Some(_) => Err(Error::MissingKey {
                    key: format!("{}.rope_type", self.name),
                    expected: KNOWN.to_owned(),
                }),
            };
        };
        match kind.as_str() {
            Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear {
                factor: self.factor()?,
            }),
            // transformers measures this one against the config's own maximum, whatever the original was.
            Some("dynamic") => Ok(RopeScaling::Dynamic {
                factor: self.factor()?,
                original_max_positions: max_positions,
            }),
            Some("llama3") => self.llama3(max_positions),
            Some("yarn") => self.yarn(max_positions),
            _ => Err(self.bad(key, kind, KNOWN)),
        }
    }

    fn llama3(&self, max_positions: usize) -> Result<RopeScaling> {
        let low_freq_factor = self.needed("low_freq_factor")?;
        let high_freq_factor = self.needed("high_freq_factor")?;
        if high_freq_factor <= low_freq_factor {
            let value = self.get("high_freq_factor").unwrap_or(&Value::Null);
            return Err(self.bad("high_freq_factor", value, "a number above low_freq_factor"));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.factor()?,
            low_freq_factor,
            high_freq_factor,
            original_max_positions: self.original(max_positions)?,
        })
    }

    fn yarn(&self, max_positions: usize) -> Result<RopeScaling> {
        let original_max_positions = self.original(max_positions)?;
        let factor = match self.get("factor") {
            Some(_) => self.factor()?,
            None => max_positions as f64 / original_max_positions as f64,
        };
        let mscale = |scale: f64| {
            if factor <= 1.0 {
                1.0
            } else {
                0.1 * scale * factor.ln() + 1.0
            }
        };
        let inferred = match (self.number("mscale")?, self.number("mscale_all_dim")?) {
            (Some(scale), Some(all)) => mscale(scale) / mscale(all),
            _ => mscale(1.0),
        };
        let truncate = match self.get("truncate") {
            None => true,
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.bad("truncate", value, "true or false"))?,
        };
        Ok(RopeScaling::Yarn {
            factor,
            attention_factor: self.number("attention_factor")?.unwrap_or(inferred),
            beta_fast: self.number("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.number("beta_slow")?.unwrap_or(1.0),
            original_max_positions,
            truncate,
        })
    }
}
