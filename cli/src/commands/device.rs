//! The devices of this machine.

use espalier_worker::agent::options::DeviceOptions;
use espalier_worker::discovery;

use crate::args::How;
use crate::output;

/// Prints what [`discovery::find`] reads. The process ends right afterwards, and with it its contexts.
pub(crate) fn look() -> anyhow::Result<()> {
    output::print_json(&serde_json::to_value(discovery::look())?)
}

pub(crate) fn list(how: How) -> anyhow::Result<()> {
    let machine = discovery::find(None)?;
    if let Some(refusal) = &machine.refusal {
        output::say(refusal);
    }
    output::devices(&DeviceOptions::cpu(0), &machine).print(how)
}
