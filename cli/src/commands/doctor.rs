//! Looking after a data directory while no coordinator runs on it.

use std::fmt::Write as _;
use std::io::ErrorKind;

use espalier_coordinator::Error;
use espalier_coordinator::doctor::{self, Report};

use crate::args::{DataDir, DoctorCommand, Format};
use crate::{failure, output};

pub(crate) fn run(command: DoctorCommand) -> anyhow::Result<()> {
    match command {
        DoctorCommand::Check(arguments) => {
            let data_dir = arguments.data_dir.display();
            let remedy = format!("run `espalier doctor repair --data-dir {data_dir}`");
            tell(&doctor::check(&arguments.data_dir)?, arguments.format, &remedy)
        }
        DoctorCommand::Repair(arguments) => {
            let remedy = "what is left to do is said above";
            tell(&doctor::repair(&arguments.data_dir)?, arguments.format, remedy)
        }
        DoctorCommand::Export(arguments) => export(&arguments),
    }
}

fn tell(report: &Report, format: Format, remedy: &str) -> anyhow::Result<()> {
    let value = serde_json::to_value(report)?;
    match format {
        Format::Json => output::print_json(&value)?,
        Format::Yaml => output::print(&output::yaml(&value)?)?,
        Format::Table | Format::Wide => output::print(&text(report))?,
    }
    if report.starts {
        return Ok(());
    }
    Err(failure::job(format!(
        "a coordinator would not start on it: {remedy}"
    )))
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let weight = if finding.fatal { "fatal" } else { "minor" };
        let _ = writeln!(text, "{weight}  {}: {}", finding.path.display(), finding.problem);
    }
    for mended in &report.mended {
        let _ = writeln!(text, "done   {mended}");
    }
    if let Some(copies) = &report.copies {
        let _ = writeln!(
            text,
            "copies of what was cut or replaced lie in {}",
            copies.display()
        );
    }
    let _ = writeln!(
        text,
        "{}; {} snapshots, {} segments and {} archives are there",
        if report.starts {
            format!("starts, up to frame {}", report.last_frame)
        } else {
            "does not start".to_owned()
        },
        report.snapshots,
        report.segments,
        report.archives
    );
    text
}

fn export(arguments: &DataDir) -> anyhow::Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let exported = match doctor::export(&arguments.data_dir, &mut out) {
        // A reader that went away has what it wanted.
        Err(Error::File { source, .. }) if source.kind() == ErrorKind::BrokenPipe => return Ok(()),
        exported => exported?,
    };
    match std::io::Write::flush(&mut out) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
        flushed => flushed?,
    }
    output::say(&format!(
        "{} events, frames {} to {}",
        exported.events, exported.first_frame, exported.last_frame
    ));
    match exported.damage {
        Some(damage) => Err(failure::job(format!("not everything could be read: {damage}"))),
        None => Ok(()),
    }
}
