//! The `CostTables` service: what a coordinator keeps of targets across jobs. It reads and writes the directory itself; the
//! loop knows nothing of it.

use espalier_proto::MESSAGE_LIMIT_BYTES;
use espalier_proto::v1::{self, cost_tables_server};
use tonic::{Request, Response, Status};

use crate::Error;
use crate::cost_tables::{CostTables, KeptTable, Summary};

/// Of a message, beside the table that it carries.
const BESIDE_BYTES: usize = 64 << 10;

/// The service.
#[derive(Debug)]
pub struct Service {
    pub(super) tables: CostTables,
}

impl Service {
    /// Does what reads or writes the disk.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&CostTables) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let tables = self.tables.clone();
        let done = tokio::task::spawn_blocking(move || work(&tables)).await;
        done.map_err(|error| Status::internal(error.to_string()))?
    }
}

#[tonic::async_trait]
impl cost_tables_server::CostTables for Service {
    async fn list_tables(
        &self,
        _: Request<v1::ListTablesRequest>,
    ) -> Result<Response<v1::ListTablesResponse>, Status> {
        let listed = |tables: &CostTables| {
            let (tables, unreadable) = tables.list().map_err(status)?;
            let summaries_json = tables.iter().map(|table| json(&Summary::of(table)));
            Ok(v1::ListTablesResponse {
                summaries_json: summaries_json.collect::<Result<_, _>>()?,
                unreadable,
            })
        };
        self.with(listed).await.map(Response::new)
    }

    async fn get_table(
        &self,
        request: Request<v1::GetTableRequest>,
    ) -> Result<Response<v1::GetTableResponse>, Status> {
        let id = request.into_inner().id;
        let found = move |tables: &CostTables| {
            let table_json = json(&tables.find(&id).map_err(status)?)?;
            if table_json.len() > MESSAGE_LIMIT_BYTES - BESIDE_BYTES {
                return Err(Status::resource_exhausted(format!(
                    "table {id} has {} bytes, more than a message carries; read it in the coordinator's directory, with \
                     --cost-tables",
                    table_json.len()
                )));
            }
            Ok(v1::GetTableResponse { table_json })
        };
        self.with(found).await.map(Response::new)
    }

    async fn keep_table(
        &self,
        request: Request<v1::KeepTableRequest>,
    ) -> Result<Response<v1::KeepTableResponse>, Status> {
        let text = request.into_inner().table_json;
        let kept = move |tables: &CostTables| {
            let table = KeptTable::parse(&text)
                .map_err(|reason| Status::invalid_argument(format!("table_json: {reason}")))?;
            let news = tables.keep(&table).map_err(status)?;
            let id = table.id();
            Ok(v1::KeepTableResponse { id, news })
        };
        self.with(kept).await.map(Response::new)
    }

    async fn remove_table(
        &self,
        request: Request<v1::RemoveTableRequest>,
    ) -> Result<Response<v1::RemoveTableResponse>, Status> {
        let id = request.into_inner().id;
        let removed = move |tables: &CostTables| {
            let table = tables.remove(&id).map_err(status)?;
            Ok(v1::RemoveTableResponse { id: table.id() })
        };
        self.with(removed).await.map(Response::new)
    }
}

fn json(value: &impl serde::Serialize) -> Result<String, Status> {
    serde_json::to_string(value).map_err(|error| Status::internal(error.to_string()))
}

fn status(error: Error) -> Status {
    let message = error.to_string();
    match error {
        Error::NotFound(_) => Status::not_found(message),
        Error::Invalid(_) => Status::invalid_argument(message),
        Error::Conflict(_) => Status::failed_precondition(message),
        Error::Exhausted(_) => Status::resource_exhausted(message),
        error if error.is_full() => Status::resource_exhausted(message),
        _ => Status::internal(message),
    }
}
