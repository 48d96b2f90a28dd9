//! Cost tables that are kept.

use std::path::Path;

use espalier_coordinator::cost_tables::{CostTables, KeptTable, write_whole};

use crate::args::{Tables, TablesCommand};
use crate::{failure, output};

pub(crate) fn run(command: TablesCommand) -> anyhow::Result<()> {
    match command {
        TablesCommand::List { tables, how } => output::tables(&all(&tables)?).print(how),
        TablesCommand::Show { key, tables, how } => output::table_rows(&one(&tables, &key)?).print_one(how),
        TablesCommand::Export { key, file, tables } => export(&one(&tables, &key)?, &file),
        TablesCommand::Import { file, tables } => import(&file, &tables),
    }
}

/// Every table that can be read; of the others is said what is wrong with them.
fn all(tables: &Tables) -> anyhow::Result<Vec<KeptTable>> {
    let directory = tables.cost_tables.display();
    let (listed, wrong) = CostTables::at(&tables.cost_tables)
        .list()
        .map_err(|error| failure::usage(format!("{directory} cannot be listed: {error}")))?;
    for reason in wrong {
        output::say(&reason);
    }
    Ok(listed)
}

fn one(tables: &Tables, key: &str) -> anyhow::Result<KeptTable> {
    let mut alike = all(tables)?;
    alike.retain(|table| table.id().starts_with(key));
    match (alike.pop(), alike.is_empty()) {
        (Some(table), true) => Ok(table),
        (None, _) => Err(failure::not_found(format!(
            "{} has no table {key}; `espalier profile list` shows what it has",
            tables.cost_tables.display()
        ))),
        (Some(_), false) => Err(failure::usage(format!(
            "{key} is how {} tables begin; give more digits",
            alike.len() + 1
        ))),
    }
}

fn export(table: &KeptTable, file: &Path) -> anyhow::Result<()> {
    if file.symlink_metadata().is_ok() {
        return Err(failure::conflict(format!(
            "{} exists; name a file that does not",
            file.display()
        )));
    }
    let mut json = serde_json::to_vec_pretty(table)?;
    json.push(b'\n');
    write_whole(file, &json)
        .map_err(|error| failure::machine(format!("cannot write {}: {error}", file.display())))
}

fn import(file: &Path, tables: &Tables) -> anyhow::Result<()> {
    let table = KeptTable::read(file).map_err(failure::usage)?;
    let directory = tables.cost_tables.display();
    let news = CostTables::at(&tables.cost_tables)
        .keep(&table)
        .map_err(|error| failure::machine(format!("cannot write into {directory}: {error}")))?;
    if !news {
        output::say("all of it was known");
    }
    output::print(&format!("{}\n", table.id()))
}
