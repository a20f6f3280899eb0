/* The first process of a guest: maps memory for a device by VFIO's type1 container, says what it
   mapped (IOVA, frame, bytes, rights), prints what the kernel traced and shows, and stays. With
   mapper.ko among its modules it leaves mapping to that; shower.ko shows tables as debugfs does. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <linux/vfio.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>
static int pm;
static void put(const char *path, const char *text) { int f=open(path,O_WRONLY); if (f<0||write(f,text,strlen(text))<0) perror(path); if (f>=0) close(f); }
static void show(const char *name, const char *path) { char b[65536]; int f=open(path,O_RDONLY); long n; if (f<0) return; printf("SHOW %s\n",name); fflush(stdout); while ((n=read(f,b,sizeof b))>0) write(1,b,n); close(f); printf("SHOW end\n"); fflush(stdout); }
static uint64_t frame(void *p) { uint64_t e=0; pread(pm,&e,8,((uintptr_t)p>>12)*8); return (e&((1ull<<55)-1))<<12; }
static void map(int c, void *p, uint64_t iova, uint64_t len, int flags, const char *how) {
  struct vfio_iommu_type1_dma_map m={.argsz=sizeof m,.flags=flags,.vaddr=(uintptr_t)p,.iova=iova,.size=len};
  if (ioctl(c,VFIO_IOMMU_MAP_DMA,&m)) { perror("map"); return; }
  for (uint64_t at=0; at<len;) { uint64_t f=frame((char*)p+at), n=4096; while (at+n<len && frame((char*)p+at+n)==f+n) n+=4096;
    printf("HELD %#llx %#llx %#llx %s\n",(unsigned long long)(iova+at),(unsigned long long)f,(unsigned long long)n,how); at+=n; }
}
static void vfio(const char *bdf) {
  char path[256],link[256]; snprintf(path,256,"/sys/bus/pci/devices/%s/driver_override",bdf); put(path,"vfio-pci");
  snprintf(path,256,"/sys/bus/pci/devices/%s/driver/unbind",bdf); if (!access(path,F_OK)) put(path,bdf);
  put("/sys/bus/pci/drivers_probe",bdf);
  snprintf(path,256,"/sys/bus/pci/devices/%s/iommu_group",bdf); long n=readlink(path,link,255); if (n<0) { perror("group"); return; } link[n]=0;
  int c=open("/dev/vfio/vfio",O_RDWR); snprintf(path,256,"/dev/vfio/%s",strrchr(link,'/')+1); int g=open(path,O_RDWR);
  if (c<0||g<0) { perror(path); return; }
  if (ioctl(g,VFIO_GROUP_SET_CONTAINER,&c)) { perror("set container"); return; }
  if (ioctl(c,VFIO_SET_IOMMU,VFIO_TYPE1v2_IOMMU)) { perror("set iommu"); return; }
  int prot=PROT_READ|PROT_WRITE, anon=MAP_PRIVATE|MAP_ANONYMOUS|MAP_POPULATE;
  char *base=mmap(0,64<<12,prot,anon,-1,0); madvise(base,64<<12,MADV_NOHUGEPAGE); memset(base,1,64<<12);
  int rw=VFIO_DMA_MAP_FLAG_READ|VFIO_DMA_MAP_FLAG_WRITE;
  void *huge=mmap(0,8<<20,prot,anon|MAP_HUGETLB,-1,0);
  if (huge==MAP_FAILED) perror("hugetlb"); else { memset(huge,1,8<<20); map(c,huge,0x40000000,8<<20,rw,"rw"); map(c,huge,0x80001000,64<<10,rw,"rw"); }
  map(c,base,0x10000000,32<<12,rw,"rw");
  map(c,base+(32<<12),0x20001000,32<<12,VFIO_DMA_MAP_FLAG_READ,"r");
}
int main(void){
  mkdir("/dev",0755); mkdir("/proc",0755); mkdir("/sys",0755);
  mount("d","/dev","devtmpfs",0,0); mount("p","/proc","proc",0,0); mount("s","/sys","sysfs",0,0); mount("d","/sys/kernel/debug","debugfs",0,0); mount("t","/sys/kernel/tracing","tracefs",0,0);
  int con=open("/dev/console",O_RDWR); dup2(con,0); dup2(con,1); dup2(con,2); setvbuf(stdout,0,_IOLBF,0);
  struct utsname u; uname(&u); printf("KERNEL %s %s\n",u.release,u.machine);
  put("/proc/sys/kernel/printk","1"); put("/proc/sys/vm/nr_hugepages","8");
  put("/sys/kernel/tracing/events/iommu/enable","1");
  FILE *order=fopen("/m/order","r"); char line[128];
  while (order&&fgets(line,128,order)) { line[strcspn(line,"\n")]=0; char path[160]; snprintf(path,160,"/m/%s",line); int f=open(path,O_RDONLY);
    const char *args=strstr(line,"type1")?"allow_unsafe_interrupts=1":""; if (syscall(SYS_finit_module,f,args,0)) { perror(path); } close(f); }
  if (!order) put("/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts","1");
  pm=open("/proc/self/pagemap",O_RDONLY);
  DIR *d=opendir("/sys/bus/pci/devices"); struct dirent *e; char bdfs[32][16]; int n=0;
  while (d&&(e=readdir(d))) if (e->d_name[0]!='.'&&n<32) { char path[300],c[16]={0}; snprintf(path,300,"/sys/bus/pci/devices/%s/class",e->d_name); int f=open(path,O_RDONLY); read(f,c,8); close(f);
    printf("PCI %s %s\n",e->d_name,c); if (!strncmp(c,"0x010802",8)) strncpy(bdfs[n++],e->d_name,15); }
  int mapped=!access("/m/mapper.ko",F_OK);
  for (int i=0;i<n;i++) if (!mapped&&!strcmp(bdfs[i]+8,"05.0")) vfio(bdfs[i]);
  int shower=open("/m/shower.ko",O_RDONLY); FILE *symbols=fopen("/proc/kallsyms","r"); unsigned long units=0, find=0, at; char name[256];
  while (shower>=0&&fscanf(symbols,"%lx %*c %255s%*[^\n]",&at,name)==2) { if (!strcmp(name,"dmar_drhd_units")) units=at; if (!strcmp(name,"iommu_context_addr")) find=at; }
  snprintf(name,256,"units=%lu find=%lu",units,find); if (shower>=0&&syscall(SYS_finit_module,shower,name,0)) perror("shower.ko");
  show("trace","/sys/kernel/tracing/trace");
  show("debugfs",shower<0?"/sys/kernel/debug/iommu/intel/domain_translation_struct":"/sys/kernel/debug/domain_translation_struct");
  show("dmar","/sys/kernel/debug/iommu/intel/dmar_translation_struct");
  show("iomem","/proc/iomem");
  printf("DUMP now\n"); fflush(stdout);
  for (;;) pause();
}
