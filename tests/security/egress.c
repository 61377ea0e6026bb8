// Preloaded into a process, notes every address that it means to reach beyond itself: one line in the file named by
// EGRESS_LOG for a connection or datagram to an internet address, and for a name that is looked up. Whoever makes the
// call, in Python, C++ or Rust, makes it through these functions of the C library.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static void note(const char *what, const char *where) {
    const char *path = getenv("EGRESS_LOG");
    if (path == NULL) return;
    char line[512];
    int length = snprintf(line, sizeof line, "%d %s %s\n", getpid(), what, where);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file < 0 || write(file, line, (size_t)length) != length) abort();
    close(file);
}

static void note_address(const char *what, const struct sockaddr *address) {
    char text[INET6_ADDRSTRLEN] = "?";
    if (address == NULL) return;
    if (address->sa_family == AF_INET)
        inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, text, sizeof text);
    else if (address->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)address)->sin6_addr, text, sizeof text);
    else
        return;
    note(what, text);
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    note_address("connect", address);
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    return real(fd, address, length);
}

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *address, socklen_t length) {
    note_address("sendto", address);
    ssize_t (*real)(int, const void *, size_t, int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "sendto");
    return real(fd, data, size, flags, address, length);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    note_address("sendmsg", message->msg_name);
    ssize_t (*real)(int, const struct msghdr *, int) = dlsym(RTLD_NEXT, "sendmsg");
    return real(fd, message, flags);
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    if (node != NULL) note("getaddrinfo", node);
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    return real(node, service, hints, found);
}
