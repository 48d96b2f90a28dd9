//! Cost tables that are kept, in a directory or by a coordinator.

use std::path::Path;

use espalier_coordinator::client::Client;
use espalier_coordinator::cost_tables::{CostTables, KeptTable, Summary, write_whole};

use super::{confirm, connect};
use crate::args::{Tables, TablesCommand};
use crate::{failure, output};

pub(crate) async fn run(command: TablesCommand) -> anyhow::Result<()> {
    match command {
        TablesCommand::List { tables } => {
            let (summaries, wrong) = Place::of(&tables).await?.list().await?;
            for reason in wrong {
                output::say(&reason);
            }
            output::tables(&summaries).print(tables.remote.how)
        }
        TablesCommand::Show { key, tables } => {
            let table = Place::of(&tables).await?.find(&key).await?;
            output::table_rows(&table).print_one(tables.remote.how)
        }
        TablesCommand::Export { key, file, tables } => {
            refuse_existing(&file)?;
            export(&Place::of(&tables).await?.find(&key).await?, &file)
        }
        TablesCommand::Import { file, tables } => {
            let table = KeptTable::read(&file).map_err(failure::usage)?;
            let (id, news) = Place::of(&tables).await?.keep(&table).await?;
            if !news {
                output::say("all of it was known");
            }
            output::print(&format!("{id}\n"))
        }
        TablesCommand::Remove { key, yes, tables } => {
            let mut place = Place::of(&tables).await?;
            let table = place.find(&key).await?;
            let what = format!(
                "remove table {} of {}, to be measured anew",
                table.id(),
                table.key.device
            );
            confirm(&what, yes)?;
            let id = place.remove(&table.id()).await?;
            output::print(&format!("{id}\n"))
        }
    }
}

/// Where tables are kept.
enum Place {
    Directory(CostTables),
    Coordinator(Box<Client>),
}

impl Place {
    async fn of(tables: &Tables) -> anyhow::Result<Self> {
        Ok(match &tables.cost_tables {
            Some(directory) => Self::Directory(CostTables::at(directory)),
            None => Self::Coordinator(Box::new(connect(&tables.remote).await?)),
        })
    }

    async fn list(&mut self) -> anyhow::Result<(Vec<Summary>, Vec<String>)> {
        Ok(match self {
            Self::Directory(tables) => {
                let (listed, wrong) = tables.list()?;
                (listed.iter().map(Summary::of).collect(), wrong)
            }
            Self::Coordinator(client) => client.cost_tables().await?,
        })
    }

    async fn find(&mut self, key: &str) -> anyhow::Result<KeptTable> {
        Ok(match self {
            Self::Directory(tables) => tables.find(key)?,
            Self::Coordinator(client) => client.cost_table(key).await?,
        })
    }

    async fn keep(&mut self, table: &KeptTable) -> anyhow::Result<(String, bool)> {
        Ok(match self {
            Self::Directory(tables) => (table.id(), tables.keep(table)?),
            Self::Coordinator(client) => client.keep_cost_table(table).await?,
        })
    }

    async fn remove(&mut self, key: &str) -> anyhow::Result<String> {
        Ok(match self {
            Self::Directory(tables) => tables.remove(key)?.id(),
            Self::Coordinator(client) => client.remove_cost_table(key).await?,
        })
    }
}

fn refuse_existing(file: &Path) -> anyhow::Result<()> {
    if file.symlink_metadata().is_ok() {
        return Err(failure::conflict(format!(
            "{} exists; name a file that does not",
            file.display()
        )));
    }
    Ok(())
}

fn export(table: &KeptTable, file: &Path) -> anyhow::Result<()> {
    let mut json = serde_json::to_vec_pretty(table)?;
    json.push(b'\n');
    write_whole(file, &json)
        .map_err(|error| failure::machine(format!("cannot write {}: {error}", file.display())))
}
