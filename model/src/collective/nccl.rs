//! Ranks with a GPU each: NCCL moves tensors between the devices, beside their compute streams.
//!
//! A communicator has a *lane* for its collective calls and one for the messages of each direction between two of its
//! ranks: an NCCL communicator, a stream and a thread. A message that waits for its receiver therefore holds up
//! nothing else, and no order of sends and receives can lock two ranks against each other. Lanes are made when they are
//! first used, and end after all ranks have let go of the communicator: drop it and the gang, then close the mesh.
//!
//! A call waits on the device for what was queued before it, and [`InFlight::wait`] lets the compute stream wait for
//! the call; the host goes on. Once the mesh is broken, a call takes too long or NCCL fails, every lane of every rank is
//! aborted: the device goes on with anything in its buffers, and [`Communicator::check`] says so.
//!
//! A device's own deadline ([`Options::deadline`](crate::ops::cuda::Options)) should be no shorter than the mesh's for
//! calls: a rank that waits for a slower one would give its device up. More streams than `CUDA_DEVICE_MAX_CONNECTIONS`
//! (8 unless it is set) may hold each other up: set it to 32 for a rank that has both replicas and stages.

mod lane;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::members::Members;
use super::mesh::Mesh;
use super::{Communicator, Flight, InFlight, expect_other, share_of};
use crate::ops::cuda::{Beside, CudaDevice, Matrix, nccl_version};
use crate::{Device, ElementType, Error, Result, Tensor};
use lane::{Call, Job, Lane, Parting, Purpose};

/// What the communicators of a gang have in common: the device, and how they part.
#[derive(Debug)]
pub(super) struct Lanes {
    beside: Beside,
    parting: Arc<Parting>,
}

impl Lanes {
    /// Of this rank of `mesh`, which works on `device`.
    ///
    /// # Errors
    /// When NCCL is not there.
    pub(super) fn new(mesh: &Arc<Mesh>, device: &CudaDevice) -> Result<Self> {
        let (version, beside) = (nccl_version()?, device.beside());
        tracing::info!(
            version,
            rank = mesh.rank(),
            size = mesh.size(),
            "NCCL moves tensors between the ranks"
        );
        if beside.deadline() < mesh.options().call {
            tracing::warn!(
                device = ?beside.deadline(),
                calls = ?mesh.options().call,
                "the device is given up before a slow rank is"
            );
        }
        Ok(Self {
            parting: Arc::new(Parting::new(mesh.clone())),
            beside,
        })
    }

    /// Joins ranks of the mesh.
    pub(super) fn join(&self, members: Members) -> Arc<dyn Communicator> {
        Arc::new(Nccl {
            members: Arc::new(members),
            beside: self.beside.clone(),
            lanes: Mutex::default(),
            parting: self.parting.clone(),
        })
    }
}

/// Some ranks of a gang of GPUs.
#[derive(Debug)]
struct Nccl {
    members: Arc<Members>,
    beside: Beside,
    lanes: Mutex<HashMap<Purpose, Lane>>,
    parting: Arc<Parting>,
}

/// What a communicator of one gives: what it was given.
#[derive(Debug)]
struct Alone(Tensor);

impl Flight for Alone {
    fn wait(self: Box<Self>) -> Result<Tensor> {
        Ok(self.0)
    }
}

impl Nccl {
    /// An operand on this device, without gaps.
    fn operand(&self, operation: &'static str, tensor: &Tensor) -> Result<Matrix> {
        let matrix = tensor.cuda()?;
        if matrix.is_contiguous() && self.beside.holds(&matrix) {
            return Ok(matrix);
        }
        Err(Error::Shape {
            operation,
            expected: format!(
                "no gaps between rows, on {} as opened",
                Device::Cuda(self.beside.index())
            ),
            found: format!("{matrix} on {}", tensor.device()),
        })
    }

    fn new_tensor(&self, like: &Matrix, rows: usize) -> Result<(Tensor, Matrix)> {
        let matrix = self.beside.matrix(like.element(), rows, like.columns())?;
        let tensor = Tensor::on_cuda(matrix.clone(), self.beside.index())?;
        Ok((tensor, matrix))
    }

    /// Hands a call to its lane. `result` is what the call leaves; it and `operands` are kept until then.
    fn call(&self, purpose: Purpose, call: Call, operands: Vec<Matrix>, result: Tensor) -> Result<InFlight> {
        self.check()?;
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let lane = match lanes.entry(purpose) {
            std::collections::hash_map::Entry::Occupied(lane) => lane.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                let lane = Lane::start(&self.members, &self.beside, purpose, self.parting.clone())?;
                place.insert(lane)
            }
        };
        // After everything queued so far, memory that was freed for the operands included.
        let before = self.beside.compute().mark()?;
        lane.queue(
            Job {
                call,
                operands,
                before,
            },
            result,
        )
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.members.rank
    }

    fn size(&self) -> usize {
        self.members.size()
    }

    fn all_reduce(&self, tensor: Tensor) -> Result<InFlight> {
        let operand = self.operand("all_reduce", &tensor)?;
        if self.size() == 1 || operand.is_empty() {
            return Ok(InFlight(Box::new(Alone(tensor))));
        }
        self.call(Purpose::Together, Call::AllReduce, vec![operand], tensor)
    }

    fn reduce_scatter(&self, whole: Tensor) -> Result<InFlight> {
        let operand = self.operand("reduce_scatter", &whole)?;
        let rows = share_of(&whole, self.size())?;
        if self.size() == 1 || operand.is_empty() {
            return Ok(InFlight(Box::new(Alone(whole.first_rows(rows)?))));
        }
        let (share, matrix) = self.new_tensor(&operand, rows)?;
        self.call(
            Purpose::Together,
            Call::ReduceScatter,
            vec![operand, matrix],
            share,
        )
    }

    fn all_gather(&self, part: Tensor) -> Result<InFlight> {
        let operand = self.operand("all_gather", &part)?;
        if self.size() == 1 {
            return Ok(InFlight(Box::new(Alone(part))));
        }
        let (whole, matrix) = self.new_tensor(&operand, part.rows() * self.size())?;
        if operand.is_empty() {
            return Ok(InFlight(Box::new(Alone(whole))));
        }
        self.call(Purpose::Together, Call::AllGather, vec![operand, matrix], whole)
    }

    fn broadcast(&self, tensor: Tensor, root: usize) -> Result<InFlight> {
        if root != self.rank() {
            expect_other("broadcast", self.rank(), self.size(), root)?;
        }
        let operand = self.operand("broadcast", &tensor)?;
        if self.size() == 1 || operand.is_empty() {
            return Ok(InFlight(Box::new(Alone(tensor))));
        }
        self.call(Purpose::Together, Call::Broadcast { root }, vec![operand], tensor)
    }

    fn send(&self, tensor: Tensor, to: usize) -> Result<InFlight> {
        expect_other("send", self.rank(), self.size(), to)?;
        let operand = self.operand("send", &tensor)?;
        if operand.is_empty() {
            return Ok(InFlight(Box::new(Alone(tensor))));
        }
        let purpose = Purpose::Message {
            from: self.rank(),
            to,
        };
        self.call(purpose, Call::Send, vec![operand], tensor)
    }

    fn receive(
        &self,
        rows: usize,
        columns: usize,
        element_type: ElementType,
        from: usize,
    ) -> Result<InFlight> {
        expect_other("receive", self.rank(), self.size(), from)?;
        let matrix = self.beside.matrix(element_type.into(), rows, columns)?;
        let tensor = Tensor::on_cuda(matrix.clone(), self.beside.index())?;
        if matrix.is_empty() {
            return Ok(InFlight(Box::new(Alone(tensor))));
        }
        let purpose = Purpose::Message {
            from,
            to: self.rank(),
        };
        self.call(purpose, Call::Receive, vec![matrix], tensor)
    }

    fn check(&self) -> Result<()> {
        Ok(self.members.mesh.check()?)
    }

    fn abort(&self) {
        self.members.mesh.abort();
    }
}
