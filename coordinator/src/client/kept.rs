//! Cost tables that a coordinator keeps across jobs.

use espalier_proto::v1;

use super::Client;
use crate::cost_tables::{KeptTable, Summary};
use crate::{Error, Result};

impl Client {
    /// Every cost table by its key, and what is wrong with files that are none.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when nobody answers.
    pub async fn cost_tables(&mut self) -> Result<(Vec<Summary>, Vec<String>)> {
        let request = self.timed(v1::ListTablesRequest {});
        let response = self.kept.list_tables(request).await;
        let response = response.map_err(|status| self.error("list tables", &status))?;
        let v1::ListTablesResponse {
            summaries_json,
            unreadable,
        } = response.into_inner();
        let summaries = summaries_json.iter().map(|json| read(json));
        Ok((summaries.collect::<Result<_>>()?, unreadable))
    }

    /// The one cost table whose id begins so.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is none, [`Error::Invalid`] when there are several.
    pub async fn cost_table(&mut self, id: &str) -> Result<KeptTable> {
        let request = self.timed(v1::GetTableRequest { id: id.to_owned() });
        let response = self.kept.get_table(request).await;
        let response = response.map_err(|status| self.error("get table", &status))?;
        read(&response.into_inner().table_json)
    }

    /// Adds what a table says to what is kept of its target. Returns its id, and whether that was anything new.
    ///
    /// # Errors
    /// [`Error::Conflict`] when a newer version keeps that target's table.
    pub async fn keep_cost_table(&mut self, table: &KeptTable) -> Result<(String, bool)> {
        let table_json = serde_json::to_string(table).map_err(|error| Error::Internal(error.to_string()))?;
        let request = self.timed(v1::KeepTableRequest { table_json });
        let response = self.kept.keep_table(request).await;
        let response = response.map_err(|status| self.error("keep table", &status))?;
        let v1::KeepTableResponse { id, news } = response.into_inner();
        Ok((id, news))
    }

    /// Removes the one cost table whose id begins so, and returns its id.
    ///
    /// # Errors
    /// As [`Self::cost_table`].
    pub async fn remove_cost_table(&mut self, id: &str) -> Result<String> {
        let request = self.timed(v1::RemoveTableRequest { id: id.to_owned() });
        let response = self.kept.remove_table(request).await;
        let response = response.map_err(|status| self.error("remove table", &status))?;
        Ok(response.into_inner().id)
    }
}

fn read<T: serde::de::DeserializeOwned>(json: &str) -> Result<T> {
    serde_json::from_str(json).map_err(|error| {
        Error::Internal(format!(
            "the coordinator's answer is no cost table: {error}; use the version of the coordinator"
        ))
    })
}
