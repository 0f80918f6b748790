/* The relay: a port in a sandbox whose connections are carried over its input and output.
 *
 *   relay PORT [FILE FOLDER]
 *
 * It listens on 127.0.0.1 and passes on, in frames, what clients send and receive. A frame is a
 * head of three 32-bit numbers (kind, connection, payload length), then the payload;
 * connections.py has the same list of kinds. The harness reads all frames, and sends a connection
 * at most WINDOW bytes that were not yet taken, so memory is fixed and no client delays another.
 *
 * FILE is this program and FOLDER where it lies: it removes both when it listens. It ends when its
 * input does, so it outlives neither the harness nor the command that it was started with.
 */
#include "../../../inspect_docker_pool/native/kernel.h"

#define CONNECTIONS 256
#define WINDOW (64 * 1024)
#define CHUNK (16 * 1024)

enum { LISTENING = 1, OPENED, DATA, ENDED, GONE, TAKEN, FAILED };
enum { SEND = 1, CLOSE };

struct connection {
  int fd, closing, over;
  u32 id, head, held;
};

struct pollfd_ {
  int fd;
  short events, revents;
};

static struct connection connections[CONNECTIONS];
static u8 rings[CONNECTIONS][WINDOW];
static u8 piece[12 + CHUNK], news[CHUNK];
static u8 head[12];
static u32 head_have, body_have, ids;
static int listener;

static void put32(u8 *to, u32 value) { memcpy(to, &value, 4); }

/* Send a frame whose payload is in `piece` already; wait until it is taken. */
static void tell(u32 kind, u32 id, u32 size) {
  put32(piece, kind), put32(piece + 4, id), put32(piece + 8, size);
  for (u32 sent = 0; sent < size + 12;) {
    long n = write_(1, piece + sent, size + 12 - sent);
    if (n == -EINTR) continue;
    if (n == -EAGAIN) {
      nap(1);
      continue;
    }
    if (n <= 0) leave(0);
    sent += (u32)n;
  }
}

static void fail(u32 stage, long error) {
  put32(piece + 12, stage), put32(piece + 16, (u32)-error);
  tell(FAILED, 0, 8);
  leave(1);
}

static struct connection *find(u32 id) {
  for (int i = 0; i < CONNECTIONS; i++)
    if (connections[i].fd >= 0 && connections[i].id == id) return &connections[i];
  return 0;
}

static void drop(struct connection *one) {
  u32 id = one->id;
  close_(one->fd);
  one->fd = -1;
  tell(GONE, id, 0);
}

static void welcome(void) {
  int one = 1;
  for (int i = 0; i < CONNECTIONS; i++) {
    if (connections[i].fd >= 0) continue;
    long fd = CALL(accept4, listener, 0, 0, 04000 | 02000000 /* not blocking, close on exec */, 0, 0);
    if (fd < 0) return;
    CALL(setsockopt, fd, 6 /* TCP */, 1 /* no delay */, &one, sizeof one, 0);
    connections[i] = (struct connection){(int)fd, 0, 0, ++ids, 0, 0};
    tell(OPENED, connections[i].id, 0);
  }
}

/* Send as much as a client takes now. */
static void feed(struct connection *one) {
  u8 *ring = rings[one - connections];
  u32 taken = 0;
  while (one->held) {
    u32 part = WINDOW - one->head < one->held ? WINDOW - one->head : one->held;
    long n = CALL(sendto, one->fd, ring + one->head, part, 0x4000 /* no signal */, 0, 0);
    if (n == -EINTR) continue;
    if (n == -EAGAIN) break;
    if (n <= 0) {
      drop(one);
      return;
    }
    one->head = (one->head + (u32)n) % WINDOW;
    one->held -= (u32)n, taken += (u32)n;
  }
  if (taken) {
    put32(piece + 12, taken);
    tell(TAKEN, one->id, 4);
  }
  if (!one->held && one->closing) drop(one);
}

static void take(struct connection *one) {
  long n = read_(one->fd, piece + 12, CHUNK);
  if (n == -EAGAIN || n == -EINTR) return;
  if (n > 0) {
    tell(DATA, one->id, (u32)n);
  } else if (n == 0) {
    one->over = 1;
    tell(ENDED, one->id, 0);
  } else {
    drop(one);
  }
}

static void obey(u8 *data, u32 size) {
  while (size || head_have == 12) {
    if (head_have < 12) {
      head[head_have++] = *data++, size--;
      continue;
    }
    u32 kind, id, length_;
    memcpy(&kind, head, 4), memcpy(&id, head + 4, 4), memcpy(&length_, head + 8, 4);
    u32 part = length_ - body_have < size ? length_ - body_have : size;
    struct connection *one = find(id);
    for (u32 i = 0; one && kind == SEND && i < part && one->held < WINDOW; i++)
      rings[one - connections][(one->head + one->held++) % WINDOW] = data[i];
    data += part, size -= part, body_have += part;
    if (one && kind == CLOSE) one->closing = 1;
    if (one) feed(one);
    if (body_have < length_) return;
    head_have = body_have = 0;
  }
}

static void serve(void) {
  static struct pollfd_ set[2 + CONNECTIONS];
  for (;;) {
    int room = 0;
    set[0] = (struct pollfd_){0, POLLIN, 0};
    for (int i = 0; i < CONNECTIONS; i++) {
      struct connection *one = &connections[i];
      short wanted = (short)((one->over ? 0 : POLLIN) | (one->held ? POLLOUT : 0));
      if (one->fd < 0) room = 1;
      set[2 + i] = (struct pollfd_){one->fd, wanted, 0};
    }
    set[1] = (struct pollfd_){room ? listener : -1, POLLIN, 0};
    if (CALL(ppoll, set, 2 + CONNECTIONS, 0, 0, 0, 0) < 0) continue;
    if (set[0].revents) {
      long n = read_(0, news, CHUNK);
      if (n == 0 || (n < 0 && n != -EAGAIN && n != -EINTR)) leave(0);
      if (n > 0) obey(news, (u32)n);
    }
    for (int i = 0; i < CONNECTIONS; i++) {
      struct connection *one = &connections[i];
      if (one->fd != set[2 + i].fd || one->fd < 0) continue;
      if (set[2 + i].revents & POLLOUT) feed(one);
      if (one->fd >= 0 && set[2 + i].revents & ~POLLOUT) {
        if (one->over)
          drop(one); /* both directions are closed */
        else
          take(one);
      }
    }
    if (set[1].revents) welcome();
  }
}

void begin(unsigned long *stack) {
  long argc = (long)stack[0], failed;
  char **argv = (char **)(stack + 1);
  long port = argc > 1 ? number(argv[1], argv[1] + length(argv[1])) : -1;
  int one = 1;
  struct {
    u16 family;
    u8 port[2], address[4], rest[8];
  } where = {2 /* AF_INET */, {(u8)(port >> 8), (u8)port}, {127, 0, 0, 1}, {0}};
  for (int i = 0; i < CONNECTIONS; i++) connections[i].fd = -1;
  if (port < 1 || port > 65535) fail(0, -EINVAL);
  listener = (int)CALL3(socket, 2, 1 | 04000 | 02000000 /* SOCK_STREAM, flags as above */, 0);
  if (listener < 0) fail(1, listener);
  CALL(setsockopt, listener, 1, 2 /* SO_REUSEADDR */, &one, sizeof one, 0);
  if ((failed = CALL3(bind, listener, &where, sizeof where)) < 0) fail(2, failed);
  if ((failed = CALL3(listen, listener, 1024, 0)) < 0) fail(3, failed);
  if (argc > 3) {
    CALL3(unlinkat, AT_FDCWD_, argv[2], 0);
    CALL3(unlinkat, AT_FDCWD_, argv[3], 0x200 /* AT_REMOVEDIR */);
  }
  tell(LISTENING, 0, 0);
  serve();
}
