//! What is free, as one decision uses it up.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::scheduler::index::{Class, HostUse};
use crate::scheduler::{Device, JobId, State, Task, Worker, WorkerId};

/// A worker and the place of one of its devices.
pub type Slot = (WorkerId, usize);

/// The device in a slot.
pub fn device_at(state: &State, slot: Slot) -> Option<&Device> {
    state.worker(slot.0)?.devices.get(slot.1)
}

/// Free devices of one kind, by what their children hold.
#[derive(Default)]
struct Shelf<'a> {
    fresh: BTreeSet<Slot>,
    warm: BTreeMap<(JobId, &'a str), BTreeSet<Slot>>,
}

impl<'a> Shelf<'a> {
    fn put(&mut self, device: &'a Device, slot: Slot) {
        match &device.last {
            Some((job, kind)) => self.warm.entry((*job, kind.as_str())).or_default().insert(slot),
            None => self.fresh.insert(slot),
        };
    }

    fn remove(&mut self, device: &'a Device, slot: Slot) {
        match &device.last {
            Some((job, kind)) => {
                if let Some(slots) = self.warm.get_mut(&(*job, kind.as_str())) {
                    slots.remove(&slot);
                }
            }
            None => {
                self.fresh.remove(&slot);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = Slot> {
        self.fresh.iter().chain(self.warm.values().flatten()).copied()
    }

    /// Every slot, those first whose child has the least to change for this task.
    fn for_task(&self, task: &'a Task) -> impl Iterator<Item = Slot> {
        let own = self.warm.get(&(task.job, task.kind.as_str()));
        let of_job = self.warm.range((task.job, "")..(task.job.next(), ""));
        let others = self.warm.iter().filter(|((job, _), _)| *job != task.job);
        own.into_iter()
            .chain(of_job.map(|(_, slots)| slots))
            .chain([&self.fresh])
            .chain(others.map(|(_, slots)| slots))
            .flatten()
            .copied()
    }
}

/// Free devices and busy hosts.
pub struct Room<'a> {
    state: &'a State,
    absent: &'a BTreeSet<WorkerId>,
    shelves: HashMap<&'a str, Shelf<'a>>,
    /// Hosts that this decision changed.
    hosts: HashMap<&'a str, HostUse>,
    /// The host that is to become quiet.
    quieting: Option<&'a str>,
    /// Kinds of device of which a gang keeps what is free.
    held: BTreeSet<&'a str>,
}

impl<'a> Room<'a> {
    pub fn new(state: &'a State, absent: &'a BTreeSet<WorkerId>) -> Self {
        Self {
            state,
            absent,
            shelves: HashMap::new(),
            hosts: HashMap::new(),
            quieting: None,
            held: BTreeSet::new(),
        }
    }

    /// A device for a task; elsewhere than where it failed, if that can be.
    pub fn find(&mut self, class: &'a Class, task: &'a Task) -> Option<Slot> {
        self.stock(class);
        let shelf = self.shelves.get(class.device_kind.as_str())?;
        let fits = |slot: &Slot| self.fits(*slot, class);
        let failed_on = task.failed_on();
        if failed_on.is_some() {
            let elsewhere = |slot: &Slot| Some(slot.0) != failed_on;
            let found = shelf.for_task(task).filter(elsewhere).find(fits);
            if found.is_some() {
                return found;
            }
        }
        shelf.for_task(task).find(fits)
    }

    /// Devices for every rank, on as few hosts as the emptiest allow; none when they are not all there.
    pub fn find_gang(&mut self, class: &'a Class, task: &'a Task) -> Option<Vec<Slot>> {
        self.stock(class);
        let shelf = self.shelves.get(class.device_kind.as_str())?;
        let ranks = usize::try_from(self.ranks_of_gang(class)?).ok()?;
        let mut slots: Vec<Slot> = shelf.all().filter(|slot| self.fits(*slot, class)).collect();
        if slots.len() < ranks {
            return None;
        }
        let mut on_host: HashMap<&str, usize> = HashMap::new();
        for slot in &slots {
            *on_host.entry(self.host_of(*slot)).or_default() += 1;
        }
        let failed_on = task.failed_on();
        slots.sort_by_cached_key(|slot| {
            let host = self.host_of(*slot);
            let free = on_host.get(host).copied().unwrap_or(0);
            (Some(slot.0) == failed_on, Reverse(free), host, *slot)
        });
        slots.truncate(ranks);
        Some(slots)
    }

    /// Uses up a device.
    pub fn take(&mut self, slot: Slot, class: &Class) {
        let Some(worker) = self.state.worker(slot.0) else {
            return;
        };
        self.drop_slot(slot);
        let host = worker.host.as_str();
        let mut used = self.use_of(host);
        used.running = used.running.saturating_add(1);
        used.exclusive = used.exclusive.saturating_add(usize::from(class.exclusive));
        self.hosts.insert(host, used);
    }

    /// Keeps the host with the fewest attempts from those behind, so that it becomes quiet.
    pub fn hold_a_host(&mut self, class: &'a Class) {
        if self.quieting.is_some() {
            return;
        }
        let Some(shelf) = self.shelves.get(class.device_kind.as_str()) else {
            return;
        };
        let able = shelf.all().filter(|slot| self.can_run(*slot, class));
        let hosts: BTreeSet<&str> = able.map(|slot| self.host_of(slot)).collect();
        self.quieting = hosts.into_iter().min_by_key(|host| self.use_of(host).running);
    }

    /// Keeps what is free from those behind, if there are devices enough for the gang at all.
    pub fn hold_for_gang(&mut self, class: &'a Class) {
        let kind = class.device_kind.as_str();
        let there = self.devices(class, |worker| !self.absent.contains(&worker.id));
        let is_enough = self.ranks_of_gang(class).is_some_and(|ranks| ranks <= there);
        if self.held.contains(kind) || !is_enough {
            return;
        }
        self.held.insert(kind);
        let Some(shelf) = self.shelves.get(class.device_kind.as_str()) else {
            return;
        };
        let able: Vec<Slot> = shelf.all().filter(|slot| self.can_run(*slot, class)).collect();
        for slot in able {
            self.drop_slot(slot);
        }
    }

    /// As many as the gang asks for, or as the cluster has.
    fn ranks_of_gang(&self, class: &Class) -> Option<u32> {
        class.ranks_of(self.devices(class, |_| true))
    }

    /// Devices of usable workers that could run a rank of the gang, busy ones too.
    fn devices(&self, class: &Class, counts: impl Fn(&Worker) -> bool) -> u32 {
        let workers = self.state.workers();
        let able = workers.filter(|worker| worker.is_usable() && counts(worker));
        let fitting = able
            .flat_map(|worker| &worker.devices)
            .filter(|device| device.info.is_of(class) && !self.state.is_cut_off(device));
        u32::try_from(fitting.count()).unwrap_or(u32::MAX)
    }

    /// Looks up what is free of the class's kind, once a decision.
    fn stock(&mut self, class: &'a Class) {
        let (state, absent) = (self.state, self.absent);
        self.shelves.entry(class.device_kind.as_str()).or_insert_with(|| {
            let mut shelf = Shelf::default();
            let free = state.index.free.get(&class.device_kind).into_iter().flatten();
            for slot in free.filter(|slot| !absent.contains(&slot.0)) {
                if let Some(device) = device_at(state, *slot) {
                    shelf.put(device, *slot);
                }
            }
            shelf
        });
    }

    fn drop_slot(&mut self, slot: Slot) {
        let Some(device) = device_at(self.state, slot) else {
            return;
        };
        if let Some(shelf) = self.shelves.get_mut(device.info.kind.as_str()) {
            shelf.remove(device, slot);
        }
    }

    fn fits(&self, slot: Slot, class: &Class) -> bool {
        let host = self.host_of(slot);
        let used = self.use_of(host);
        let open = if class.exclusive {
            used.running == 0
        } else {
            used.exclusive == 0 && self.quieting != Some(host)
        };
        open && self.can_run(slot, class)
    }

    fn can_run(&self, slot: Slot, class: &Class) -> bool {
        device_at(self.state, slot).is_some_and(|device| device.info.can_run(class))
    }

    fn host_of(&self, slot: Slot) -> &'a str {
        self.state
            .worker(slot.0)
            .map_or("", |worker| worker.host.as_str())
    }

    fn use_of(&self, host: &str) -> HostUse {
        let used = self.hosts.get(host).or_else(|| self.state.index.hosts.get(host));
        used.copied().unwrap_or_default()
    }
}
