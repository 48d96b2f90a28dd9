//! Chat messages as text: the parent's own template (jinja, with the Python methods that templates use),
//! or ChatML where the parent has none.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value as Jinja, context};
use serde_json::Value;

use crate::{Error, Result};

/// Renders `messages` as the parent was trained to see them.
pub struct ChatTemplate {
    environment: Option<Environment<'static>>,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// ChatML: `<|im_start|>role`, a line end, the content, `<|im_end|>` and a line end, for each message.
    pub fn chat_ml() -> Self {
        Self {
            environment: None,
            bos_token: String::new(),
            eos_token: String::new(),
        }
    }

    /// A parent's template with the texts of its special tokens.
    ///
    /// # Errors
    /// When the template cannot be parsed.
    pub fn parse(template: &str, bos_token: String, eos_token: String) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|error| Error::ChatTemplate {
            reason: error.to_string(),
        })?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<Jinja, _> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment
            .add_template_owned("chat", template.to_owned())
            .map_err(|error| Error::ChatTemplate {
                reason: error.to_string(),
            })?;
        Ok(Self {
            environment: Some(environment),
            bos_token,
            eos_token,
        })
    }

    /// The text of a list of `{role, content}`.
    ///
    /// # Errors
    /// What is wrong with the messages, or what the template objects to.
    pub fn render(&self, messages: &Value) -> std::result::Result<String, String> {
        let list = messages
            .as_array()
            .ok_or("messages is not a list, expected a list of {role, content}")?;
        for (index, message) in list.iter().enumerate() {
            if message.get("role").and_then(Value::as_str).is_none() {
                return Err(format!(
                    "messages[{index}] has no role, expected a string such as user"
                ));
            }
        }
        let Some(environment) = &self.environment else {
            return render_chat_ml(list);
        };
        let template = environment
            .get_template("chat")
            .map_err(|error| error.to_string())?;
        template
            .render(context! {
                messages => to_jinja(messages),
                bos_token => &self.bos_token,
                eos_token => &self.eos_token,
                add_generation_prompt => false,
            })
            .map_err(|error| format!("the chat template refuses the messages: {error}"))
    }
}

fn to_jinja(value: &Value) -> Jinja {
    match value {
        Value::Null => Jinja::from(()),
        Value::Bool(value) => Jinja::from(*value),
        Value::Number(number) => match number.as_i64() {
            Some(number) => Jinja::from(number),
            None => Jinja::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => Jinja::from(text.as_str()),
        Value::Array(list) => Jinja::from(list.iter().map(to_jinja).collect::<Vec<_>>()),
        Value::Object(fields) => {
            Jinja::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), to_jinja(value))))
        }
    }
}

fn render_chat_ml(messages: &[Value]) -> std::result::Result<String, String> {
    let mut text = String::new();
    for (index, message) in messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        let content = message
            .get("content")
            .and_then(Value::as_str)
            .ok_or_else(|| format!("messages[{index}] has no content, expected a string"))?;
        text.push_str(&format!("<|im_start|>{role}\n{content}<|im_end|>\n"));
    }
    Ok(text)
}
