//! How ranks exchange tensors.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::trace::Trace;
use crate::{Error, Result};

/// An ordered set of ranks that take part in a collective, and the channel on which they do. Every member names the same
/// ranks in the same order.
///
/// Collectives of one group complete in the order of issue; those of different ranks or channels do not wait for each
/// other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    ranks: Arc<Vec<usize>>,
    channel: Channel,
}

/// What a group's collectives are for. Each channel has an order of its own, so that a gradient that one rank reduces late
/// does not change the order in which parameters are gathered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Channel {
    /// Small messages and everything else.
    #[default]
    Control,
    /// Gradients on their way to their owners.
    Gradients,
    /// Parameters on their way from their owners.
    Parameters,
}

impl Group {
    /// The group of these ranks, in this order.
    pub fn new(ranks: Vec<usize>) -> Self {
        Self { ranks: Arc::new(ranks), channel: Channel::default() }
    }

    /// The same ranks on another channel.
    #[must_use]
    pub fn on(&self, channel: Channel) -> Self {
        Self { ranks: Arc::clone(&self.ranks), channel }
    }

    /// The channel.
    pub fn channel(&self) -> Channel {
        self.channel
    }

    /// All ranks of a world.
    pub fn world(size: usize) -> Self {
        Self::new((0..size).collect())
    }

    /// The ranks.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Position of `rank` in the group.
    pub fn index(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|&r| r == rank)
    }
}

/// How addends combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Sum.
    Sum,
    /// Maximum.
    Max,
}

/// A collective with the tensors of this rank. Tensors are 1-D and contiguous; "member" is an index in the group.
#[derive(Debug)]
pub enum Collective {
    /// Combines `tensor` over the group in place, in the order of members; the same bits on every rank.
    AllReduce {
        /// In and out, same length and dtype on every rank.
        tensor: Tensor,
        /// How.
        op: Reduce,
    },
    /// Member m receives the sum over members s of `inputs[m]` of s, added in the order of s.
    ReduceScatter {
        /// One piece for each member, possibly empty; piece m has the same length on every rank.
        inputs: Vec<Tensor>,
        /// This rank's sum. May be float32 with 16-bit inputs. May be the same memory as this rank's own piece.
        output: Tensor,
        /// Adds into `output` one addend after the other (`((out + a0) + a1) + ...`) instead of replacing it.
        accumulate: bool,
    },
    /// `outputs[m]` of every rank receives `input` of member m.
    AllGather {
        /// This rank's piece.
        input: Tensor,
        /// One for each member, possibly empty. The own one may be the same memory as `input`.
        outputs: Vec<Tensor>,
    },
    /// `outputs[s]` receives `inputs[this rank]` of member s.
    AllToAll {
        /// One for each member.
        inputs: Vec<Tensor>,
        /// One for each member.
        outputs: Vec<Tensor>,
    },
    /// `tensor` of every rank receives that of member `root`.
    Broadcast {
        /// In at the root, out elsewhere.
        tensor: Tensor,
        /// Index of the sender in the group.
        root: usize,
    },
    /// A small message: every rank receives the bytes of all members, by member. Counted as `control`.
    Exchange {
        /// This rank's bytes; lengths may differ between ranks.
        bytes: Vec<u8>,
    },
}

impl Collective {
    /// The name in counters and messages: `all_reduce`, `reduce_scatter`, ...
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "all_reduce",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllGather { .. } => "all_gather",
            Self::AllToAll { .. } => "all_to_all",
            Self::Broadcast { .. } => "broadcast",
            Self::Exchange { .. } => "exchange",
        }
    }
}

/// A collective to be issued, with what it is for.
#[derive(Debug)]
pub struct Request {
    /// Who takes part.
    pub group: Group,
    /// What for (`model.layers.3 gradients, bucket 0`), shown when it does not complete.
    pub label: String,
    /// The collective.
    pub collective: Collective,
}

/// The other side of a [`Ticket`], implemented by transports.
pub trait TicketState: Send {
    /// Waits until the collective is complete; the bytes of all members for an exchange, else nothing.
    ///
    /// # Errors
    /// A peer that failed or never arrived, within the transport's timeout, naming collective, label and rank.
    fn wait(self: Box<Self>) -> Result<Vec<Vec<u8>>>;

    /// Whether `wait` would return at once.
    fn is_done(&self) -> bool;
}

/// A collective in flight. Its tensors must be neither read nor written before [`Ticket::wait`].
#[must_use = "a collective is complete only after wait"]
pub struct Ticket(Box<dyn TicketState>);

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").field("done", &self.0.is_done()).finish()
    }
}

impl Ticket {
    /// A ticket over a transport's state.
    pub fn new(state: Box<dyn TicketState>) -> Self {
        Self(state)
    }

    /// Waits until the collective is complete.
    ///
    /// # Errors
    /// As [`TicketState::wait`].
    pub fn wait(self) -> Result<()> {
        self.0.wait().map(drop)
    }

    /// Waits for an exchange and returns the bytes of all members.
    ///
    /// # Errors
    /// As [`TicketState::wait`].
    pub fn bytes(self) -> Result<Vec<Vec<u8>>> {
        self.0.wait()
    }

    /// Whether [`Ticket::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

/// Bytes a ring would send per rank: (N-1)/N of the buffer, twice that for an all-reduce.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommBytes {
    /// 2 (N-1)/N of the buffer.
    pub all_reduce: u64,
    /// (N-1)/N of all inputs.
    pub reduce_scatter: u64,
    /// (N-1)/N of all outputs.
    pub all_gather: u64,
    /// Inputs for other members.
    pub all_to_all: u64,
    /// (N-1)/N of the buffer.
    pub broadcast: u64,
    /// Exchanges: bytes sent to the other members, as a ring all-gather.
    pub control: u64,
}

impl CommBytes {
    /// What was added since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            all_reduce: self.all_reduce - earlier.all_reduce,
            reduce_scatter: self.reduce_scatter - earlier.reduce_scatter,
            all_gather: self.all_gather - earlier.all_gather,
            all_to_all: self.all_to_all - earlier.all_to_all,
            broadcast: self.broadcast - earlier.broadcast,
            control: self.control - earlier.control,
        }
    }
}

/// One rank's connection to the others. Collectives of one group complete in the order of issue, which is the same on
/// all its ranks; they run beside the caller.
pub trait Transport: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Starts a collective and returns at once.
    ///
    /// # Errors
    /// A broken connection; tensors that are not 1-D, contiguous and of a supported type (float32, float16, bfloat16,
    /// float64, int64, uint8); a rank outside the group.
    fn issue(&mut self, request: Request) -> Result<Ticket>;

    /// Has the transport record when its collectives move bytes, in the lane [`crate::trace::Lane::Comm`]. The default
    /// records nothing.
    fn record(&mut self, _trace: &Trace) {}

    /// Counted since the start.
    fn bytes(&self) -> CommBytes;

    /// Tells all other ranks that this one failed, so that their waits end with `reason`.
    fn abort(&self, reason: &str);
}

impl dyn Transport + '_ {
    /// Issues an exchange in the world group and waits for it.
    ///
    /// # Errors
    /// As [`Transport::issue`] and [`TicketState::wait`].
    pub fn exchange(&mut self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let group = Group::world(self.world());
        self.issue(Request { group, label: label.into(), collective: Collective::Exchange { bytes } })?.bytes()
    }

    /// Waits until every rank has come here.
    ///
    /// # Errors
    /// As [`Transport::issue`] and [`TicketState::wait`].
    pub fn barrier(&mut self, label: &str) -> Result<()> {
        self.exchange(label, Vec::new()).map(drop)
    }
}

/// What a run file's `[transport]` builds: knows the world and connects the ranks that live in this process.
pub trait Fabric: Send + Sync {
    /// Number of ranks of the whole run.
    fn world(&self) -> usize;

    /// The ranks that this process runs, each on a thread of its own.
    fn local_ranks(&self) -> Vec<usize>;

    /// Connects `rank`; called once for each local rank, each from its own thread.
    ///
    /// # Errors
    /// Peers that cannot be reached within the timeout.
    fn connect(&self, rank: usize) -> Result<Box<dyn Transport>>;

    /// How long a collective may take.
    fn timeout(&self) -> Duration;

    /// Whether rank 0 is in this process, which then decides and writes what exists once.
    fn leads(&self) -> bool {
        self.local_ranks().contains(&0)
    }

    /// What the process of rank 0 says, on all processes alike; every process calls this as often, in the same order,
    /// before its ranks connect. The default serves a run in one process.
    ///
    /// # Errors
    /// Peers that cannot be reached within the timeout.
    fn agree(&self, said: Vec<u8>) -> Result<Vec<u8>> {
        Ok(said)
    }

    /// Consecutive ranks that share a machine, which the scope `"node"` means. The default takes the whole world for one.
    fn ranks_per_node(&self) -> usize {
        self.world()
    }
}

impl Error {
    /// An [`Error::Comm`].
    pub fn comm(message: impl Into<String>) -> Self {
        Self::Comm(message.into())
    }
}
