//! From text to [`JobSpec`]: YAML or JSON, unknown keys and wrong types named by their path.
//!
//! The text is first read as a plain value and held against the spec's own JSON schema, so that the
//! schema users see and the errors they get cannot differ. Only then is it read as the type.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{CostTableSource, JobSpec, SpecError, json_schema};

/// Names further away than this are not worth suggesting.
const SIMILAR_ENOUGH: f64 = 0.6;

impl JobSpec {
    /// Reads a spec and checks it; relative paths are taken from `base_dir`, the directory of the spec's file.
    ///
    /// # Errors
    /// One clear line for the first thing wrong: its path, what stands there, and what would be right.
    pub fn from_yaml(text: &str, base_dir: &Path) -> Result<Self, SpecError> {
        let options = serde_saphyr::options! { with_snippet: false };
        let value: Value = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
            SpecError::new(
                "",
                format!(
                    "not valid YAML: {}",
                    in_plain_words(&one_line(&error.to_string()))
                ),
            )
        })?;
        let mut spec = Self::from_value(value)?;
        spec.resolve_paths(base_dir);
        spec.check()?;
        Ok(spec)
    }

    /// Reads a spec as it travels between processes: JSON, its paths already resolved.
    ///
    /// # Errors
    /// As [`Self::from_yaml`].
    pub fn from_json(text: &str) -> Result<Self, SpecError> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| SpecError::new("", format!("not valid JSON: {error}")))?;
        let spec = Self::from_value(value)?;
        spec.check()?;
        Ok(spec)
    }

    fn from_value(value: Value) -> Result<Self, SpecError> {
        let schema = json_schema();
        Walk { root: &schema }.check("", &schema, &value)?;
        serde_json::from_value(value).map_err(|error| SpecError::new("", one_line(&error.to_string())))
    }

    fn resolve_paths(&mut self, base_dir: &Path) {
        let resolve = |path: &mut String| *path = absolute(base_dir, path);
        if !self.parent.starts_with("hf://") {
            resolve(&mut self.parent);
        }
        self.data.train.iter_mut().for_each(resolve);
        self.data.validation.iter_mut().for_each(resolve);
        self.evaluate.benchmarks.iter_mut().for_each(resolve);
        self.output.iter_mut().for_each(resolve);
        if let Some(CostTableSource::File(file)) = &mut self.target.cost_table {
            resolve(file);
        }
    }
}

fn absolute(base_dir: &Path, path: &str) -> String {
    let path = base_dir.join(path);
    let cleaned: PathBuf = path.components().collect();
    cleaned.to_string_lossy().into_owned()
}

/// What the YAML reader says, where it speaks of its own types and options rather than of the text.
fn in_plain_words(message: &str) -> String {
    let said_plainly = [
        (
            "duplicate mapping key",
            "a key stands twice in one mapping; leave one of them out",
        ),
        (
            "multiple YAML documents",
            "a second document begins; a spec is one",
        ),
        (
            "recursive references",
            "an alias refers to what it stands in; write the value out",
        ),
        ("expected string scalar", "a key is no text; write it as one"),
        (
            "invalid u64",
            "a value does not fit the type its tag names; leave the tag out",
        ),
    ];
    let Some((_, plainly)) = said_plainly.iter().find(|(start, _)| message.starts_with(start)) else {
        return message.to_owned();
    };
    match message.rfind(" at line ") {
        Some(place) => format!("{plainly},{}", message.get(place..).unwrap_or_default()),
        None => (*plainly).to_owned(),
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Holds a value against a JSON schema of the shapes that schemars derives for the spec.
struct Walk<'a> {
    root: &'a Value,
}

impl<'a> Walk<'a> {
    fn check(&self, path: &str, schema: &'a Value, value: &Value) -> Result<(), SpecError> {
        let purpose = self.purpose(schema);
        let schema = self.resolve(schema);
        if let Some(choices) = alternatives(schema) {
            return self.check_choices(path, schema, choices, value);
        }
        let accepted = accepted_types(schema);
        if !accepted.is_empty() && !accepted.iter().any(|name| is_of_type(name, value)) {
            let message = format!(
                "found {}, expected {}{purpose}",
                describe(value),
                names(&accepted)
            );
            return Err(SpecError::new(path, message));
        }
        check_words(path, schema, value)?;
        check_range(path, schema, value)?;
        match value {
            Value::Object(fields) => self.check_fields(path, schema, fields),
            Value::Array(items) => self.check_items(path, schema, items),
            _ => Ok(()),
        }
    }

    /// `anyOf` and `oneOf`: an option, an untagged enum, or documented words.
    fn check_choices(
        &self,
        path: &str,
        schema: &'a Value,
        choices: &'a [Value],
        value: &Value,
    ) -> Result<(), SpecError> {
        let mut reasons = Vec::new();
        for choice in choices {
            match self.check(path, choice, value) {
                Ok(()) => return Ok(()),
                Err(reason) => reasons.push((self.resolve(choice), reason)),
            }
        }
        // The reason of the alternative that is of the value's own type says most.
        let mut same_type = reasons.iter().filter(|(choice, _)| {
            accepted_types(choice).iter().any(|name| is_of_type(name, value)) && words(choice).is_none()
        });
        if let (Some((_, reason)), None) = (same_type.next(), same_type.next()) {
            return Err(reason.clone());
        }
        let words: Vec<&str> = self.all_words(schema);
        let types: Vec<&str> = choices
            .iter()
            .map(|choice| self.resolve(choice))
            .filter(|choice| words_or_alternatives(choice).is_none())
            .flat_map(accepted_types)
            .filter(|name| *name != "null")
            .collect();
        let mut expected: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
        expected.extend(types.iter().map(|name| type_name(name).to_owned()));
        Err(SpecError::new(
            path,
            format!("found {}, expected {}", describe(value), either(&expected)),
        ))
    }

    fn all_words(&self, schema: &'a Value) -> Vec<&'a str> {
        let schema = self.resolve(schema);
        let mut found = words(schema).unwrap_or_default();
        for choice in alternatives(schema).into_iter().flatten() {
            found.extend(self.all_words(choice));
        }
        found
    }

    fn check_fields(
        &self,
        path: &str,
        schema: &'a Value,
        fields: &Map<String, Value>,
    ) -> Result<(), SpecError> {
        let Some(known) = schema.get("properties").and_then(Value::as_object) else {
            return Ok(());
        };
        if fields.is_empty() && schema.get("minProperties").is_some() {
            let known = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(SpecError::new(
                path,
                format!("empty; give at least one of {known}"),
            ));
        }
        for (name, value) in fields {
            match known.get(name) {
                Some(field) => self.check(&join(path, name), field, value)?,
                None => return Err(unknown_field(path, name, known)),
            }
        }
        let required = schema
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        for name in required.filter_map(Value::as_str) {
            if !fields.contains_key(name) {
                let purpose = known
                    .get(name)
                    .map(|field| self.purpose(field))
                    .unwrap_or_default();
                return Err(SpecError::new(
                    join(path, name),
                    format!("missing; add it{purpose}"),
                ));
            }
        }
        Ok(())
    }

    fn check_items(&self, path: &str, schema: &'a Value, items: &[Value]) -> Result<(), SpecError> {
        let tuple = schema.get("prefixItems").and_then(Value::as_array);
        if let Some(tuple) = tuple
            && tuple.len() != items.len()
        {
            let message = format!("found {} values, expected {}", items.len(), tuple.len());
            return Err(SpecError::new(path, message));
        }
        for (index, item) in items.iter().enumerate() {
            let field = tuple
                .and_then(|tuple| tuple.get(index))
                .or_else(|| schema.get("items"));
            if let Some(field) = field {
                self.check(&format!("{path}[{index}]"), field, item)?;
            }
        }
        Ok(())
    }

    fn resolve(&self, schema: &'a Value) -> &'a Value {
        schema
            .get("$ref")
            .and_then(Value::as_str)
            .and_then(|reference| reference.strip_prefix('#'))
            .and_then(|pointer| self.root.pointer(pointer))
            .unwrap_or(schema)
    }

    /// The first sentence of a field's documentation, as ` (…)`.
    fn purpose(&self, schema: &'a Value) -> String {
        let description = schema
            .get("description")
            .or_else(|| self.resolve(schema).get("description"));
        let Some(text) = description.and_then(Value::as_str) else {
            return String::new();
        };
        let text = one_line(text);
        let sentence = text.split_once(". ").map_or(text.as_str(), |(first, _)| first);
        format!(" ({})", sentence.trim_end_matches('.'))
    }
}

fn unknown_field(path: &str, name: &str, known: &Map<String, Value>) -> SpecError {
    let place = if path.is_empty() {
        String::new()
    } else {
        format!(" in {path}")
    };
    let nearest = known
        .keys()
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .filter(|(similarity, _)| *similarity >= SIMILAR_ENOUGH);
    let remedy = match nearest {
        Some((_, nearest)) => format!("did you mean \"{nearest}\"?"),
        None => format!(
            "known are {}",
            known.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
        ),
    };
    SpecError::new("", format!("unknown field \"{name}\"{place}; {remedy}"))
}

fn check_words(path: &str, schema: &Value, value: &Value) -> Result<(), SpecError> {
    let (Some(words), Some(found)) = (words(schema), value.as_str()) else {
        return Ok(());
    };
    if words.contains(&found) {
        return Ok(());
    }
    let expected: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    Err(SpecError::new(
        path,
        format!("found `{found}`, expected {}", either(&expected)),
    ))
}

fn check_range(path: &str, schema: &Value, value: &Value) -> Result<(), SpecError> {
    let Some(found) = value.as_f64() else {
        return Ok(());
    };
    let minimum = schema.get("minimum").and_then(Value::as_f64);
    // The schema says the width of a whole number in place of its largest value.
    let is_narrow = schema.get("format").and_then(Value::as_str) == Some("uint32");
    let maximum = is_narrow.then_some(u32::MAX);
    let expected = if let Some(minimum) = minimum.filter(|minimum| found < *minimum) {
        format!("at least {minimum}")
    } else if let Some(maximum) = maximum.filter(|maximum| found > f64::from(*maximum)) {
        format!("at most {maximum}")
    } else {
        return Ok(());
    };
    Err(SpecError::new(
        path,
        format!("found {value}, expected {expected}"),
    ))
}

fn words(schema: &Value) -> Option<Vec<&str>> {
    if let Some(word) = schema.get("const").and_then(Value::as_str) {
        return Some(vec![word]);
    }
    schema
        .get("enum")
        .and_then(Value::as_array)
        .map(|words| words.iter().filter_map(Value::as_str).collect())
}

fn alternatives(schema: &Value) -> Option<&[Value]> {
    schema
        .get("anyOf")
        .or_else(|| schema.get("oneOf"))
        .and_then(Value::as_array)
        .map(Vec::as_slice)
}

fn words_or_alternatives(schema: &Value) -> Option<()> {
    (words(schema).is_some() || alternatives(schema).is_some()).then_some(())
}

fn accepted_types(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(name)) => vec![name.as_str()],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn is_of_type(name: &str, value: &Value) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => true,
    }
}

fn type_name(name: &str) -> &str {
    match name {
        "object" => "a mapping",
        "array" => "a list",
        "string" => "text",
        "integer" => "a whole number",
        "number" => "a number",
        "boolean" => "true or false",
        other => other,
    }
}

fn names(types: &[&str]) -> String {
    let named: Vec<String> = types
        .iter()
        .filter(|name| **name != "null")
        .map(|name| type_name(name).to_owned())
        .collect();
    either(&named)
}

fn either(options: &[String]) -> String {
    match options.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => "nothing".to_owned(),
    }
}

fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Object(_) => "a mapping".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::String(text) => format!("\"{text}\""),
        other => other.to_string(),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}
