#![allow(clippy::unwrap_used)]

use super::*;

fn disk(seed: u64) -> VirtualDisk {
    let disk = VirtualDisk::new(Dice::new(seed, "disk"), Arc::default());
    disk.create_directory(Path::new("/d")).unwrap();
    disk
}

#[test]
fn what_was_synced_survives_every_crash_and_what_was_not_some_of_them() {
    let path = Path::new("/d/file");
    let mut lengths = Vec::new();
    for seed in 0..40 {
        let disk = disk(seed);
        let mut file = disk.create(path).unwrap();
        file.append(b"synced").unwrap();
        file.sync().unwrap();
        disk.sync_directory(Path::new("/d")).unwrap();
        file.append(b" and not").unwrap();
        disk.crash();
        let left = disk.read(path).unwrap();
        assert!(left.starts_with(b"synced"), "seed {seed}: {left:?}");
        lengths.push(left.len());
    }
    assert!(lengths.contains(&6) && lengths.contains(&14), "{lengths:?}");
    assert!(
        lengths.iter().any(|length| (7..14).contains(length)),
        "none was torn: {lengths:?}"
    );
}

#[test]
fn a_name_that_was_not_synced_may_be_gone() {
    let gone = (0..20).filter(|seed| {
        let disk = disk(*seed);
        disk.create(Path::new("/d/file")).unwrap().sync().unwrap();
        disk.crash();
        disk.list(Path::new("/d")).unwrap().is_empty()
    });
    let gone = gone.count();
    assert!((1..20).contains(&gone), "{gone} of 20 were gone");
}

#[test]
fn what_was_copied_is_there_for_another_disk_after_its_name_is_gone_here() {
    let (here, there) = (disk(1), disk(2));
    let path = Path::new("/d/file");
    let mut file = here.create(path).unwrap();
    file.append(b"shipped").unwrap();
    file.sync().unwrap();
    file.append(b" and not").unwrap();
    let copied = here.copied();
    here.remove(path).unwrap();
    here.sync_directory(Path::new("/d")).unwrap();
    here.copy(&copied, &there);
    assert_eq!(there.read(path).unwrap(), b"shipped");
    here.copied();
    here.sync_directory(Path::new("/d")).unwrap();
    assert_eq!(here.used(), 0);
}

#[test]
fn power_goes_at_the_change_it_was_ordered_at_and_nothing_after_it_is_done() {
    let disk = disk(1);
    let mut file = disk.create(Path::new("/d/file")).unwrap();
    disk.order(|orders| orders.power_off_after = Some(1));
    file.append(b"one").unwrap();
    assert!(file.sync().is_err() && disk.is_off() && file.append(b"two").is_err());
}
