//! How a coordinator begins: it listens and says how it does, reads its journal, claims its term, and only then
//! takes what is asked of it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use espalier_artifact::ArtifactStore;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch as signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::inbox::Inbox;
use super::owner::{Owner, Request};
use super::room::Room;
use super::serve::{Shown, serve};
use super::surroundings::{BlockingThreads, Clock, Surroundings, SystemClock, SystemSecrets};
use super::turns::{run, tick};
use super::{CoordinatorOptions, Handle, PipelinePlanner, Planner, store};
use crate::collect::{self, Collector};
use crate::cost_tables::CostTables;
use crate::journal::disk::{Disk, SystemDisk};
use crate::lock::DirectoryLock;
use crate::logs::{self, Logs};
use crate::metrics::Metrics;
use crate::shipping;
use crate::tables::{self, Tables};
use crate::term::{Fence, OwnDirectory};
use crate::{Error, Result, http, remains};

/// Requests that may wait for the loop.
const REQUESTS: usize = 2048;

/// Starts coordinators.
#[derive(Debug)]
pub struct Coordinator;

/// A loop that is ready to turn, and what goes with it.
struct Ready {
    owner: Owner,
    tables_writer: tables::Writer,
    progress: shipping::Progress,
    shipping: Option<shipping::Prepared>,
    collector: Collector,
}

/// What a coordinator is made from.
struct Base {
    options: CoordinatorOptions,
    planner: Arc<dyn Planner>,
    disk: Arc<dyn Disk>,
}

/// What ends a loop's thread, and what it says of its end.
struct Ends {
    lock: DirectoryLock,
    failure: signal::Sender<Option<String>>,
    /// Cancelled when the loop is over.
    over: CancellationToken,
}

impl Coordinator {
    /// Replays the journal and serves. Health and readiness are answered from the beginning; this returns once all
    /// else is.
    ///
    /// # Errors
    /// When the data directory is another's or damaged, or the address cannot be listened on.
    pub async fn start(options: CoordinatorOptions) -> Result<Handle> {
        let planner = PipelinePlanner {
            cost_tables: Some(CostTables::at(options.cost_tables())),
        };
        Self::start_with(options, Arc::new(planner)).await
    }

    /// The same, with another planner in the pipeline's place.
    ///
    /// # Errors
    /// As [`Coordinator::start`].
    pub async fn start_with(options: CoordinatorOptions, planner: Arc<dyn Planner>) -> Result<Handle> {
        Self::start_on(options, planner, Arc::new(SystemDisk)).await
    }

    /// The same, with another disk under the journal.
    ///
    /// # Errors
    /// As [`Coordinator::start`].
    pub async fn start_on(
        options: CoordinatorOptions,
        planner: Arc<dyn Planner>,
        disk: Arc<dyn Disk>,
    ) -> Result<Handle> {
        let (listener, address) = listen(options.listen).await?;
        let lock = DirectoryLock::of(&options.data_dir)?;
        let (logs, log_writer) = keep_logs(options.data_dir.join("logs")).await?;
        let (requests, inbox) = mpsc::channel(REQUESTS);
        let vitals = http::Vitals::default();
        let shown = Shown {
            inbox: Inbox::new(requests.clone(), vitals.clone()),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            vitals,
            metrics: Metrics::default(),
            logs,
            cost_tables: CostTables::at(options.cost_tables()),
        };
        shown.metrics.journal_lies_in(options.data_dir.join("journal"));
        let server = tokio::spawn(serve(listener, shown.clone()));
        let tables = Tables::default();
        let (failure, failed) = signal::channel(None);
        let over = CancellationToken::new();
        let ends = Ends { lock, failure, over };
        let base = Base {
            options,
            planner,
            disk,
        };
        let began = match ready_with_room(&base, &tables, &requests, &shown).await {
            Ok(ready) => begin(ready, ends, inbox, &shown),
            Err(error) => Err(error),
        };
        let (stop, tasks) = (shown.stop.clone(), shown.tasks.clone());
        // The loop and the pages hold what they need; what is held here too would keep the logs' thread waiting.
        drop(shown);
        let owner = match began {
            Ok(owner) => owner,
            Err(error) => {
                stop.cancel();
                // It ends within its own deadline; what it panicked of is no more than the error that is told.
                let _ = server.await;
                return Err(error);
            }
        };
        let ticker = tokio::spawn(tick(requests.clone(), stop.clone()));
        tracing::info!(%address, "the coordinator listens");
        Ok(Handle {
            address,
            requests,
            failed,
            stop,
            tasks,
            tables,
            owner,
            server,
            ticker,
            log_writer,
        })
    }
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let refused = |source| Error::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let taken = listener.local_addr().map_err(refused)?;
    Ok((listener, taken))
}

async fn keep_logs(directory: PathBuf) -> Result<(Logs, thread::JoinHandle<()>)> {
    blocking(move || {
        let kept = Logs::open(&directory, logs::Options::default());
        kept.map_err(|source| Error::File {
            action: "keep logs in",
            path: directory,
            source,
        })
    })
    .await
}

/// Makes ready as soon as there is room for it, and again where there was less than it takes.
async fn ready_with_room(
    base: &Base,
    tables: &Tables,
    requests: &mpsc::Sender<Request>,
    shown: &Shown,
) -> Result<Ready> {
    let mut room = Room::new(Arc::clone(&base.disk), base.options.data_dir.join("journal"));
    loop {
        if let Err(error) = room.check().await {
            if !error.is_full() {
                return Err(error);
            }
            room.wait(shown, &error).await;
            continue;
        }
        Room::found(shown);
        match make_ready(base, tables, requests, shown).await {
            Ok(ready) => {
                room.was_enough();
                return Ok(ready);
            }
            Err(error) if error.is_full() => {
                room.start_failed();
                room.wait(shown, &error).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Replays the journal, from the store where there is none, and claims a term.
async fn make_ready(
    base: &Base,
    tables: &Tables,
    requests: &mpsc::Sender<Request>,
    shown: &Shown,
) -> Result<Ready> {
    let options = &base.options;
    let clock = Arc::new(SystemClock::default());
    let store = store::open(options)?;
    let shipping = prepare_shipping(options, &store, Arc::clone(&clock)).await?;
    let data_dir = options.data_dir.clone();
    blocking(move || refuse_lost_journal(&data_dir)).await?;
    let fence: Arc<dyn Fence> = match &shipping {
        Some(prepared) => Arc::clone(&prepared.keeper) as Arc<dyn Fence>,
        None => Arc::new(OwnDirectory),
    };
    let beside = BlockingThreads {
        runtime: tokio::runtime::Handle::current(),
        tasks: shown.tasks.clone(),
        requests: requests.downgrade(),
    };
    let secrets = SystemSecrets::new().map_err(|source| Error::File {
        action: "read",
        path: "/dev/urandom".into(),
        source,
    })?;
    let surroundings = Surroundings {
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        beside: Arc::new(beside),
        disk: Arc::clone(&base.disk),
        secrets: Arc::new(secrets),
        tables: tables.clone(),
        store: store.location(),
        store_id: store::identify(options, &store).await?,
        witness: None,
    };
    let (clock, metrics) = (clock as Arc<dyn Clock>, shown.metrics.clone());
    let collector = Collector::new(store, collecting(options), Arc::clone(&fence), clock, metrics);
    let (options, planner) = (options.clone(), Arc::clone(&base.planner));
    let (owner, shipping) = blocking(move || {
        let owner = Owner::open_fenced(options, planner, surroundings, fence)?;
        if let Some(prepared) = &shipping {
            prepared.settled()?;
        }
        Ok((owner, shipping))
    })
    .await?;
    let owner = owner.seen_by(shown.metrics.clone(), shown.logs.clone());
    let progress = shipping::Progress::default();
    progress.durable(owner.durable());
    let tables_writer = start_tables(tables, base, &owner)?;
    Ok(Ready {
        owner,
        tables_writer,
        progress,
        shipping,
        collector,
    })
}

fn refuse_lost_journal(data_dir: &Path) -> Result<()> {
    let Some(other) = remains::of_lost_journal(&SystemDisk, data_dir)? else {
        return Ok(());
    };
    let journal = data_dir.join("journal");
    Err(Error::Conflict(format!(
        "the journal {} holds nothing, but {} was left by one that did: put the journal back from a backup; or start \
         with the --store that it was shipped to, if there is one; or begin anew, once what is left is set aside by \
         `espalier doctor repair --data-dir {}`",
        journal.display(),
        other.display(),
        data_dir.display(),
    )))
}

fn start_tables(tables: &Tables, base: &Base, owner: &Owner) -> Result<tables::Writer> {
    let started = tables.start(Arc::clone(&base.disk), &base.options.data_dir, owner.position());
    started.map_err(|error| Error::Internal(format!("the tables' thread cannot be started: {error}")))
}

/// Lets the loop turn, and what goes with it run.
fn begin(
    ready: Ready,
    ends: Ends,
    inbox: mpsc::Receiver<Request>,
    shown: &Shown,
) -> Result<thread::JoinHandle<()>> {
    let Ready {
        owner,
        tables_writer,
        progress,
        shipping,
        collector,
    } = ready;
    shown.vitals.set_authority(owner.holds());
    shown.vitals.replayed();
    let (tasks, stop) = (&shown.tasks, &shown.stop);
    if let Some(prepared) = shipping {
        shown.metrics.ships(progress.clone());
        let shipper = prepared.shipper(owner.state().term().0, progress.clone());
        // What the loop's last turn makes durable is shipped too: a worker may have been told of it already.
        tasks.spawn(shipper.run(ends.over.clone()));
        tasks.spawn(prepared.keeper.keep(stop.clone()));
    }
    tasks.spawn(collector.run(stop.clone()));
    let (stop, vitals, metrics) = (stop.clone(), shown.vitals.clone(), shown.metrics.clone());
    let thread = thread::Builder::new()
        .name("espalier-owner".to_owned())
        .spawn(move || {
            let Ends { lock, failure, over } = ends;
            let _lock = lock;
            let _over = over.drop_guard();
            if let Err(error) = run(owner, inbox, &vitals, &metrics, &progress, &stop) {
                tracing::error!(%error, "the coordinator stops");
                failure.send_replace(Some(error.to_string()));
            }
            stop.cancel();
            tables_writer.stop();
        });
    thread.map_err(|error| Error::Internal(format!("the loop's thread cannot be started: {error}")))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::Internal(error.to_string()))?
}

fn collecting(options: &CoordinatorOptions) -> collect::Options {
    collect::Options {
        data_dir: options.data_dir.clone(),
        cluster: options.store.as_ref().map(|_| options.cluster.clone()),
        collect_after: options.collect_after,
    }
}

/// Makes ready to ship and to claim a term, where a store is given; one inside the data directory would be lost
/// with it.
async fn prepare_shipping(
    options: &CoordinatorOptions,
    store: &ArtifactStore,
    clock: Arc<SystemClock>,
) -> Result<Option<shipping::Prepared>> {
    if options.store.is_none() {
        return Ok(None);
    }
    let shipping = shipping::Options {
        data_dir: options.data_dir.clone(),
        cluster: options.cluster.clone(),
        interval: options.ship_interval,
        lease: options.term_lease,
    };
    shipping::prepare(store, shipping, clock).await.map(Some)
}
