//! Messages between the members of one group, which can be given up from another thread.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tch::Tensor;
use zf_sys::c10d::{ProcessGroup, Work};

/// Waits have no limit of their own: whoever waits for the collective sets it, and [`Flow::stop`] ends them.
const FOREVER: Duration = Duration::from_secs(3600 * 24 * 365);

/// Why messages did not go through.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Somebody stopped the collective.
    Stopped,
    /// The connection to this member broke.
    Broken { member: usize, why: String },
    /// Two members brought what does not fit together: the whole message.
    Conflict(String),
    /// Something else.
    Failed(String),
}

/// The messages under way, and whether more may begin.
#[derive(Debug, Default)]
pub(crate) struct Flow(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    works: Vec<Arc<Work>>,
}

impl Flow {
    /// Ends all waits, now and later.
    pub(crate) fn stop(&self) {
        let mut state = self.0.lock();
        state.stopped = true;
        for work in &state.works {
            // One that cannot be aborted ends by its own timeout.
            let _ = work.abort();
        }
    }

    pub(crate) fn stopped(&self) -> bool {
        self.0.lock().stopped
    }

    fn enter(&self, work: Work) -> Result<Arc<Work>, Trouble> {
        let work = Arc::new(work);
        let mut state = self.0.lock();
        if state.stopped {
            return Err(Trouble::Stopped);
        }
        state.works.push(Arc::clone(&work));
        Ok(work)
    }

    /// Forgets the messages of a collective that is over; those not complete are given up.
    pub(crate) fn clear(&self) {
        let works = std::mem::take(&mut self.0.lock().works);
        drop(works);
    }
}

/// A message on its way from or to a member.
#[derive(Debug)]
#[must_use = "a message has gone through only after wait"]
pub(crate) struct Parcel {
    work: Arc<Work>,
    member: usize,
}

impl Parcel {
    /// Waits until it has gone through.
    pub(crate) fn wait(&self) -> Result<(), Trouble> {
        match self.work.wait(FOREVER) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Trouble::Stopped),
            Err(error) => Err(Trouble::Broken { member: self.member, why: error.to_string() }),
        }
    }
}

/// Waits for all of them.
pub(crate) fn wait_all(parcels: &[Parcel]) -> Result<(), Trouble> {
    parcels.iter().try_for_each(Parcel::wait)
}

/// Sends and receives for one member.
pub(crate) struct Courier<'a> {
    pub(crate) group: &'a ProcessGroup,
    pub(crate) flow: &'a Flow,
    pub(crate) me: usize,
}

impl Courier<'_> {
    /// The other members, beginning with the next one, so that not all send to the same one first.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me, self.group.size());
        (1..size).map(move |step| (me + step) % size)
    }

    pub(crate) fn send(&self, to: usize, tensor: &Tensor, tag: u16) -> Result<Parcel, Trouble> {
        self.parcel(to, self.group.send(tensor, to, tag))
    }

    pub(crate) fn recv(&self, from: usize, tensor: &Tensor, tag: u16) -> Result<Parcel, Trouble> {
        self.parcel(from, self.group.recv(tensor, from, tag))
    }

    fn parcel(&self, member: usize, work: zf_sys::Result<Work>) -> Result<Parcel, Trouble> {
        let work = work.map_err(|error| Trouble::Broken { member, why: error.to_string() })?;
        Ok(Parcel { work: self.flow.enter(work)?, member })
    }
}
