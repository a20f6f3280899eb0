//! The controller itself: started, asked what it has, given queues, shut down.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use crate::access::{Access, SharedMemory};
use crate::error::{Awaited, Error};
use crate::io::{IoQueue, QueueConfig};
use crate::namespace::Namespace;
use crate::queue::{Done, Queue, allocate, overdue, poll_until};
use crate::spec::{
    self, Capabilities, Command, ControllerInfo, Identified, NamespaceInfo, Opcode, Sgls,
};

/// Entries of the admin queues. One command is in flight at a time.
const ADMIN_DEPTH: u16 = 16;
/// How long an admin command may take: as long as Linux gives it (drivers/nvme/host/core.c,
/// `admin_timeout`).
const ADMIN_LIMIT: Duration = Duration::from_secs(60);
/// How long a shutdown may take: as long as Linux gives it (drivers/nvme/host/core.c,
/// `shutdown_timeout`).
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// How many controllers were started so far; the next one has this number.
static STARTED: AtomicU64 = AtomicU64::new(0);

/// A controller that was started.
///
/// It ends in [`shutdown`](Self::shutdown). Dropped instead, it leaks its admin queues, which the
/// controller may still use.
#[must_use = "dropped, it leaks what the controller may still use"]
pub struct Controller<A: Access> {
    access: Arc<A>,
    /// Which: no two have the same number.
    number: u64,
    capabilities: Capabilities,
    info: ControllerInfo,
    /// A command in flight holds the memory that it has its answer written to.
    admin: ManuallyDrop<Queue<A, Option<A::Memory>>>,
    /// I/O queues that nobody has.
    vacant: Vec<u16>,
    /// How many I/O queues the controller grants.
    granted: u16,
}

impl<A: Access> Controller<A> {
    /// Resets and starts a controller (section 3.5.1), and asks it for up to `queues` pairs of I/O
    /// queues.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`], [`Error::Fatal`] and [`Error::Timeout`] where it does not start;
    /// [`Error::CommandSet`], [`Error::Registers`] and [`Error::Depth`] where it is none that this
    /// driver can use; [`Error::Allocate`]; and [`Error::Command`].
    pub fn new(access: A, queues: u16) -> Result<Self, Error> {
        let access = Arc::new(access);
        let len = access.registers_len();
        if len < spec::DOORBELLS {
            return Err(Error::Registers { needed: spec::DOORBELLS, len });
        }
        let capabilities = Capabilities(access.read64(spec::CAP));
        if access.read32(spec::CSTS) == spec::GONE {
            return Err(Error::Gone);
        }
        if !capabilities.has_nvm() {
            return Err(Error::CommandSet { cap: capabilities.0 });
        }
        disable(&*access, capabilities)?;
        let depth = u32::from(ADMIN_DEPTH).min(capabilities.max_entries());
        let depth = u16::try_from(depth).unwrap_or(ADMIN_DEPTH);
        let admin = Queue::new(&access, capabilities, 0, depth)?;
        let info = ControllerInfo::unknown();
        let (admin, vacant) = (ManuallyDrop::new(admin), Vec::new());
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let mut controller = Self { access, number, capabilities, info, admin, vacant, granted: 0 };
        match controller.start(queues) {
            Ok(()) => Ok(controller),
            Err(error) => {
                // What it does not stop using is leaked.
                let _ = controller.disable_and_release();
                Err(error)
            }
        }
    }

    fn start(&mut self, queues: u16) -> Result<(), Error> {
        let Self { access, capabilities, admin, .. } = self;
        let entries = u32::from(admin.depth) - 1;
        access.write32(spec::AQA, entries << 16 | entries);
        access.write64(spec::ASQ, admin.submission_addr().get());
        access.write64(spec::ACQ, admin.completion_addr().get());
        access.write32(spec::CC, spec::cc_enabled(capabilities.min_page()));
        let ready = |csts| csts & spec::CSTS_READY != 0;
        await_status(&**access, capabilities.timeout(), Awaited::Enabled, ready)?;
        let min_page = self.capabilities.min_page();
        self.info = self.identify(1, 0, |page| ControllerInfo::new(page, min_page))?;
        let granted = self.admin(Command::number_of_queues(queues), None)?.result;
        // Both numbers count from 0: submission queues, and completion queues above them.
        let granted = (granted & 0xffff).min(granted >> 16) + 1;
        self.granted = u16::try_from(granted).unwrap_or(u16::MAX).min(queues);
        self.vacant = (1..=self.granted).rev().collect();
        Ok(())
    }

    /// Returns what the controller says of itself.
    pub fn info(&self) -> &ControllerInfo {
        &self.info
    }

    /// Returns how the controller is reached.
    pub fn access(&self) -> &A {
        &self.access
    }

    /// Looks up a namespace; the first one is 1.
    ///
    /// # Errors
    ///
    /// [`Error::NoNamespace`]; [`Error::BlockFormat`] where its blocks have metadata; and as of
    /// [`create_queue`](Self::create_queue).
    pub fn namespace(&mut self, id: u32) -> Result<Namespace, Error> {
        let info = self.identify(0, id, NamespaceInfo::new)?;
        Namespace::new(self.number, id, &info)
    }

    /// Makes a pair of I/O queues, with all memory that their I/O takes.
    ///
    /// # Errors
    ///
    /// With no queues made: [`Error::NoQueue`], [`Error::Depth`], [`Error::ListPages`],
    /// [`Error::Registers`], [`Error::Vector`], [`Error::Allocate`]; and [`Error::Command`],
    /// [`Error::Timeout`], [`Error::Fatal`] or [`Error::Gone`] where the controller does not make
    /// them.
    pub fn create_queue(&mut self, config: QueueConfig) -> Result<IoQueue<A>, Error> {
        let id = self.vacant.pop().ok_or(Error::NoQueue { count: self.granted })?;
        let new = match config.vector {
            Some(vector) if vector >= self.access.vectors() => {
                Err(Error::Vector { vector, count: self.access.vectors() })
            }
            _ => {
                let Self { access, number, capabilities, info, .. } = &*self;
                IoQueue::new(access, *number, *capabilities, info, id, config)
            }
        };
        let queue = new.inspect_err(|_| self.vacant.push(id))?;
        let (depth, pair) = (config.depth, queue.queue());
        let (at, vector) = (pair.completion_addr(), config.vector);
        let create = Command::create_completion_queue(id, depth, at, vector);
        if let Err(error) = self.admin(create, None) {
            return Err(self.not_made(queue, error));
        }
        let create = Command::create_submission_queue(id, depth, pair.submission_addr());
        if let Err(error) = self.admin(create, None) {
            let delete = Command::delete_queue(Opcode::DeleteCompletionQueue, id);
            return Err(match self.admin(delete, None) {
                Ok(_) => self.not_made(queue, error),
                Err(_) => error,
            });
        }
        Ok(queue)
    }

    /// Frees queues that the controller has refused to make. Where it did not answer, they leak.
    fn not_made(&mut self, queue: IoQueue<A>, error: Error) -> Error {
        if matches!(error, Error::Command { .. }) {
            self.vacant.push(queue.queue().id);
            queue.release();
        }
        error
    }

    /// Deletes a pair of I/O queues. Commands in flight end unreaped, and their buffers are let go
    /// of.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for queues of another controller; and as of
    /// [`create_queue`](Self::create_queue). The queues are leaked then: the controller may use
    /// them.
    pub fn delete_queue(&mut self, queue: IoQueue<A>) -> Result<(), Error> {
        self.owns(&queue)?;
        let id = queue.queue().id;
        // In this order (section 5.6).
        for opcode in [Opcode::DeleteSubmissionQueue, Opcode::DeleteCompletionQueue] {
            self.admin(Command::delete_queue(opcode, id), None)?;
        }
        queue.release();
        self.vacant.push(id);
        Ok(())
    }

    /// Shuts the controller down and disables it (section 3.6.1), and frees what it used, with
    /// these of its queues. Buffers in flight are let go of.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], [`Error::Fatal`] or [`Error::Gone`] where it cannot be disabled:
    /// everything is leaked, as the controller may use it. Where it was disabled without having
    /// shut down in time, that is said and everything freed. [`Error::Foreign`] for a queue of
    /// another controller, which is leaked.
    pub fn shutdown(self, queues: impl IntoIterator<Item = IoQueue<A>>) -> Result<(), Error> {
        let access = Arc::clone(&self.access);
        let cc = access.read32(spec::CC) & !spec::CC_SHUTDOWN;
        access.write32(spec::CC, cc | spec::CC_SHUTDOWN_NORMAL);
        let done = |csts| csts & spec::CSTS_SHUTDOWN == spec::CSTS_SHUTDOWN_DONE;
        let mut ended = await_status(&*access, SHUTDOWN_LIMIT, Awaited::ShutDown, done);
        disable(&*access, self.capabilities)?;
        for queue in queues {
            match self.owns(&queue) {
                Ok(()) => queue.release(),
                Err(foreign) => ended = Err(foreign),
            }
        }
        drop(ManuallyDrop::into_inner(self.admin));
        ended
    }

    fn disable_and_release(self) -> Result<(), Error> {
        disable(&*self.access, self.capabilities)?;
        drop(ManuallyDrop::into_inner(self.admin));
        Ok(())
    }

    fn owns(&self, queue: &IoQueue<A>) -> Result<(), Error> {
        let same = Arc::ptr_eq(&self.access, &queue.queue().access);
        if same { Ok(()) } else { Err(Error::Foreign) }
    }

    /// Has a structure identified (section 5.17) and reads it.
    fn identify<T>(
        &mut self,
        cns: u32,
        namespace: u32,
        read: impl FnOnce(&Identified<'_>) -> T,
    ) -> Result<T, Error> {
        // A page is aligned to its size, so it needs one PRP.
        let page = allocate(&*self.access, Identified::BYTES, Identified::BYTES)?;
        let command = Command::identify(cns, namespace, page.addr());
        let done = self.admin(command, Some(page))?;
        let words = done.held.as_ref().map_or(&[][..], SharedMemory::words);
        Ok(read(&Identified(words)))
    }

    /// Does an admin command. Where it does not end, the queue keeps what it holds.
    fn admin(
        &mut self,
        command: Command,
        held: Option<A::Memory>,
    ) -> Result<Done<Option<A::Memory>>, Error> {
        let id = self.admin.submit_awaited(command, held)?;
        let done = self.admin.wait(id, ADMIN_LIMIT)?;
        let opcode = command.opcode;
        done.status.ok().map_err(|status| Error::Command { opcode, status })?;
        Ok(done)
    }
}

impl ControllerInfo {
    /// Of a controller that was not asked yet.
    fn unknown() -> Self {
        let (serial, model) = Default::default();
        Self { serial, model, max_transfer: None, sgls: Sgls::None }
    }
}

impl<A: Access> fmt::Debug for Controller<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Disables the controller: once it has confirmed it, it uses no memory (section 3.7.2).
fn disable<A: Access>(access: &A, capabilities: Capabilities) -> Result<(), Error> {
    let cc = access.read32(spec::CC);
    access.write32(spec::CC, cc & !(spec::CC_ENABLE | spec::CC_SHUTDOWN));
    let disabled = |csts| csts & spec::CSTS_READY == 0;
    await_status(access, capabilities.timeout(), Awaited::Disabled, disabled)
}

/// Waits until the controller's status is as it should be. One that has failed becomes neither
/// ready nor shut down any more; it may be disabled.
fn await_status<A: Access>(
    access: &A,
    limit: Duration,
    what: Awaited,
    is_so: impl Fn(u32) -> bool,
) -> Result<(), Error> {
    let look = || match access.read32(spec::CSTS) {
        spec::GONE => Some(Err(Error::Gone)),
        csts if is_so(csts) => Some(Ok(())),
        csts if csts & spec::CSTS_FATAL != 0 && what != Awaited::Disabled => {
            Some(Err(Error::Fatal { csts }))
        }
        _ => None,
    };
    poll_until(access, limit, look).unwrap_or_else(|| Err(overdue(access, what, limit)))
}
