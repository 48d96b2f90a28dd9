//! Cost tables that a coordinator keeps, over real gRPC on loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;

use common::{DEADLINE, Place, client};
use espalier_coordinator::Error;
use espalier_coordinator::cost_tables::{CostTables, DIRECTORY, KeptTable, Summary};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cost_tables_are_taken_listed_given_and_removed_by_a_coordinator() {
    let place = Place::new();
    let handle = place.coordinator().await;
    let mut client = client(&handle).await;
    assert_eq!(client.cost_tables().await.unwrap(), (Vec::new(), Vec::new()));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny/cost-table.json");
    let table = KeptTable::read(&file).unwrap();
    let (id, news) = client.keep_cost_table(&table).await.unwrap();
    assert_eq!((id.clone(), news), (table.id(), true));
    assert!(!client.keep_cost_table(&table).await.unwrap().1, "it is known");
    let mut other = table.clone();
    other.key.device = "another".to_owned();
    client.keep_cost_table(&other).await.unwrap();

    let data = place.directory.path().join("data").join(DIRECTORY);
    std::fs::write(data.join("torn.json"), "{").unwrap();
    let (summaries, wrong) = client.cost_tables().await.unwrap();
    let mut expected = [Summary::of(&table), Summary::of(&other)];
    expected.sort_by(|one, other| one.key.device.cmp(&other.key.device));
    assert_eq!(summaries, expected);
    assert!(wrong.len() == 1 && wrong[0].contains("torn.json"), "{wrong:?}");
    assert_eq!(client.cost_table(&id[..6]).await.unwrap(), table);

    let missing = client.cost_table("zz").await.unwrap_err();
    assert!(
        matches!(&missing, Error::NotFound(says) if says.contains("zz")),
        "{missing}"
    );
    let several = client.cost_table("").await.unwrap_err();
    assert!(
        matches!(&several, Error::Invalid(says) if says.contains("2 tables")),
        "{several}"
    );
    let mut negative = table.clone();
    negative.rows[0].median_ms = -1.0;
    let refused = client.keep_cost_table(&negative).await.unwrap_err();
    assert!(
        matches!(&refused, Error::Invalid(says) if says.contains("-1 ±")),
        "{refused}"
    );

    assert_eq!(client.remove_cost_table(&id).await.unwrap(), id);
    assert!(matches!(
        client.remove_cost_table(&id).await,
        Err(Error::NotFound(_))
    ));
    assert_eq!(CostTables::at(&data).list().unwrap().0, [other]);
    handle.shutdown(DEADLINE).await.unwrap();
}
