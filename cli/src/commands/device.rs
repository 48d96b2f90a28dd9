//! The devices of this machine.

use espalier_worker::agent::options::DeviceOptions;
use espalier_worker::discovery::{self, Machine};

use crate::args::{Format, How};
use crate::output;

/// Prints what [`discovery::find`] reads. The process ends right afterwards, and with it its contexts.
pub(crate) fn look(only: Option<u32>) -> anyhow::Result<()> {
    output::print_value(&serde_json::to_value(discovery::look(only))?, Format::Json)
}

pub(crate) fn list(how: How) -> anyhow::Result<()> {
    // The processor is there whatever becomes of the GPUs.
    let machine = discovery::find(None).unwrap_or_else(|error| Machine {
        refusal: Some(error.to_string()),
        ..Machine::default()
    });
    if let Some(refusal) = &machine.refusal {
        output::say(refusal);
    }
    output::devices(&DeviceOptions::cpu(0), &machine).print(how)
}
